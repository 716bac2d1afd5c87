"""The verb `verify` and its arguments. Imports no torch, so that wrong ones are answered at once."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from megamix.base.console import print_lines
from megamix.base.progress import ProgressLine
from megamix.base.signals import sigterm_unwinds
from megamix.cli.parser import Parser, add_config, check_plugins
from megamix.config import load_config
from megamix.tools.verify.core.layout import parse_layouts
from megamix.tools.verify.core.own_size import at_own_size


def verify_arguments(parser: Parser) -> None:
    parser.example = "megamix verify job.toml --layouts dp2,tp2"
    add_config(parser, "TOML file; its token files are not read", nargs="?")
    parser.add_argument("--layouts", metavar="NAMES", help="layouts to verify, as dp2,dp4,dp2tp2 (dp1,dp2)")
    parser.add_flag("--bisect", "name the first module that is wrong (compiles none)")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--runs", action="store_true", help="a job that is interrupted and goes on on each layout")
    kind.add_argument("--twice", action="store_true", help="the same job in two programs, bit for bit")
    kind.add_argument("--trainer", metavar="FILE.py:CLASS", help="a training of your own instead of a TOML file")
    parser.add_value("--ranks", "N", _worlds, "numbers of ranks for --trainer, as 1,2,4 (1,2)")
    parser.add_value("--steps", "N", _steps, "steps of --trainer (4)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda: a GPU for each rank (if there are as many)")
    parser.add_flag("--share-card", "with --device cuda: all ranks on one GPU, over Gloo")


def _worlds(text: str) -> list[int]:
    worlds = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    if 0 in worlds:
        raise argparse.ArgumentTypeError(f"got {text}, must be numbers of ranks; write --ranks 1,2")
    return worlds


def _steps(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, must be a number of steps, 1 or more; write --steps 4")
    return int(text)


def run_verify(arguments: argparse.Namespace) -> int:
    _refuse_idle(arguments)
    with sigterm_unwinds(), ProgressLine("megamix verify") as arguments.progress:  # its ranks leave nothing behind
        lines = _trainer_lines(arguments) if arguments.trainer else _config_lines(arguments)
        return 0 if print_lines(lines, arguments.progress) else 1


def _refuse_idle(arguments: argparse.Namespace) -> None:
    """End with status 2 for an argument that has no effect beside the others."""
    kind = next((kind for kind in ("trainer", "runs", "twice") if getattr(arguments, kind)), "layouts")
    idle = {"trainer": ("config", "layouts"), "layouts": ("ranks", "steps")}
    for name in idle.get(kind, ("ranks", "steps", "bisect")):
        if getattr(arguments, name):
            flag = "CONFIG" if name == "config" else f"--{name}"
            beside = "a configuration's layouts" if kind == "layouts" else f"--{kind}"
            arguments.parser.error(f"{flag} has no effect beside {beside}", "leave one of them out")


def _where(arguments: argparse.Namespace, worlds: Sequence[int]) -> str | None:
    """Return where ranks compute, as `RankPool` takes it. End with status 2 if there are fewer GPUs than ranks need."""
    if arguments.device != "cuda":
        if arguments.share_card:
            arguments.parser.error("--share-card needs --device cuda", "leave it out, or write both")
        return arguments.device  # type: ignore[no-any-return]  # argparse gives no types
    from megamix.tools.ranks import num_cards  # imports torch

    cards, needed = num_cards(), 1 if arguments.share_card else max(worlds)
    if cards < needed:
        fix = "add --share-card, and all ranks take one" if cards else "write --device cpu, or see megamix doctor"
        arguments.parser.error(f"--device cuda: needs {needed} GPU(s), and torch can use {cards}", fix)
    return "cuda:0" if arguments.share_card else "cuda"


def _trainer_lines(arguments: argparse.Namespace) -> Iterator[str]:
    from megamix.tools.verify.foreign.trainer import WrongTrainer
    from megamix.tools.verify.foreign.trainer_lines import trainer_lines

    worlds = arguments.ranks or [1, 2]
    where = _where(arguments, worlds)
    try:
        yield from trainer_lines(arguments.trainer, worlds, where, arguments.steps or 4, arguments.bisect)
    except WrongTrainer as error:
        arguments.parser.exit(2, f"megamix verify: {error}\n")


def _config_lines(arguments: argparse.Namespace) -> Iterator[str]:
    if arguments.config is None:
        arguments.parser.error("the config file is missing", "write megamix verify job.toml --layouts dp2")
    if (script := str(arguments.config).partition(":")[0]).endswith(".py"):
        arguments.parser.error(f"CONFIG: got {arguments.config}, no TOML file", f"write --trainer {script}:MyTrainer")
    config = load_config(arguments.config, arguments.overrides)
    check_plugins(arguments, config.plugins)
    names = (arguments.layouts or "dp1,dp2").split(",")
    config = at_own_size(config, arguments.overrides, names)
    layouts = parse_layouts(config, names)
    if arguments.share_card and (piped := [layout.name for layout in layouts if layout.size("pp") > 1]):
        problem = f"--share-card: got {', '.join(piped)}, but Gloo sends nothing between the stages of one GPU"
        arguments.parser.error(problem, "verify them by --device cpu, or with a GPU for each rank")
    where = _where(arguments, [layout.world_size for layout in layouts])
    if arguments.runs or arguments.twice:
        from megamix.tools.verify.runs.run_lines import runs_lines, twice_lines

        return (runs_lines if arguments.runs else twice_lines)(config, layouts, where)
    from megamix.tools.verify.layouts.layout_lines import verify_lines

    return verify_lines(config, layouts, where, arguments.progress, arguments.bisect)
