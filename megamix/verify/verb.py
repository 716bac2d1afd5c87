"""The verb `verify` and its arguments. Imports no torch, so that wrong ones are answered at once."""

from __future__ import annotations

import argparse
from typing import Any

from megamix.arguments import add_config, add_verb, check_plugins, print_lines
from megamix.config import load_config
from megamix.verify.layouts import at_own_size, parse_layouts


def add_verify(verbs: Any) -> None:
    help_text = "does training on several ranks do what one rank does? exit status 1 if not"
    verify = add_verb(verbs, "verify", _verify, help_text, "job.toml --layouts dp2,tp2")
    add_config(verify, "TOML file; its data are not read", nargs="?")
    verify.add_argument("--layouts", metavar="NAMES", default="dp1,dp2", help="as dp2,dp4,dp2tp2 (dp1,dp2)")
    verify.add_argument("--bisect", action="store_true", help="name the first module that is wrong (compiles none)")
    verify.add_argument("--trainer", metavar="FILE.py:CLASS", help="a training of your own instead of a TOML file")
    verify.add_argument("--ranks", metavar="N", type=_worlds, default=[1, 2], help="of a trainer, as 1,2,4 (1,2)")
    verify.add_argument("--steps", metavar="N", type=int, default=4, help="of a trainer (4)")


def _worlds(text: str) -> list[int]:
    worlds = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    if 0 in worlds:
        raise argparse.ArgumentTypeError(f"got {text}, must be numbers of ranks; write --ranks 1,2")
    return worlds


def _verify(arguments: argparse.Namespace) -> int:
    if arguments.trainer:
        from megamix.verify.command import trainer_lines  # and torch, which takes seconds

        try:
            return (
                0
                if print_lines(trainer_lines(arguments.trainer, arguments.ranks, arguments.steps, arguments.bisect))
                else 1
            )
        except ValueError as error:
            arguments.parser.exit(2, f"megamix verify: {error}\n")
    if arguments.config is None:
        arguments.parser.error("the config file is missing", "write megamix verify job.toml --layouts dp2")
    config = load_config(arguments.config, arguments.overrides)
    check_plugins(arguments, config)
    config = at_own_size(config, arguments.overrides)
    layouts = parse_layouts(config, arguments.layouts.split(","))
    from megamix.verify.command import verify_lines

    return 0 if print_lines(verify_lines(config, layouts, arguments.bisect)) else 1
