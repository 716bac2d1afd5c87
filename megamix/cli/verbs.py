"""The command line: a table of verbs. Each has a module of its own, which is imported when it is asked for."""

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megamix.base.console import drop_unwritten, open_streams, say, say_on_first_rank, say_unless_first_did
from megamix.base.signals import INTERRUPTED, CtrlC
from megamix.cli.parser import Parser
from megamix.config import ConfigError, override_meant
from megamix.launch.exit_status import EndedEarlyError
from megamix.plugins import PluginError, import_plugins

_NOTHING = "nothing was written; the same command starts anew"


class Verb(NamedTuple):
    """A verb: `megamix/cli/MODULE.py` has its `NAME_arguments(parser)` and its `run_NAME(arguments)`.

    `on_interrupt`: what there is after a Ctrl-C, and what the same command does then.
    """

    name: str
    module: str
    help: str
    on_interrupt: str = _NOTHING


# By task, as the help lists them.
VERBS_FOR = {
    "train a model": [
        Verb("prepare", "prepare", "make tokenizer and token files from text",
             "what is encoded is kept beside --output; the same command goes on"),
        Verb("config", "config", "show a configuration with every key that is read, or its schema"),
        Verb("plan", "plan",
             "the memory that each rank of a job will need, or its fastest layouts; exit status 1 if nothing fits"),
        Verb("train", "train", "train by a configuration file (many ranks: launch/pretrain.sh)"),
    ],
    "see whether it is right": [
        Verb("audit", "audit",
             "the dtype of every number of a step, and the precision lost; exit status 1 if too much"),
        Verb("verify", "verify",
             "compare training on several ranks with one rank; exit status 1 if they differ"),
        Verb("doctor", "doctor", "is this machine fit to train? exit status 1 if something must be mended"),
    ],
    "use a model": [
        Verb("generate", "hf", "continue prompts with a model"),
        Verb("evaluate", "hf", "perplexity of a model on a token file"),
        Verb("export", "hf", "write a model as a Hugging Face folder"),
        Verb("import", "hf", "make a checkpoint to train on from a Hugging Face folder"),
    ],
    "look and measure": [
        Verb("report", "report", "a page of a run in its folder: how it ended, its curves, and where its time went"),
        Verb("plot", "report", "draw a run's pictures as PNGs in its folder, or the curves of several runs in one",
             "pictures that were finished stay; the same command draws all anew"),
        Verb("status", "report", "how runs stand: running, stale or ended, loss, tokens/s, time left, goodput",
             "nothing was changed; the same command looks again"),
        Verb("checkpoint", "checkpoint", "look at a run's checkpoints, or hand one to torch",
             "what was printed is done, and no checkpoint is harmed; the same command starts anew"),
        Verb("hang", "hang", "say which rank the others waited for when a run on several ranks failed"),
        Verb("bench", "bench", "measure megamix on this machine's CPU beside torch's own ways to train",
             "benches that were finished are in --output; the same command starts anew"),
    ],
}  # fmt: skip
VERBS = [verb for verbs in VERBS_FOR.values() for verb in verbs]


def main(argv: Sequence[str] | None = None, run: Callable[[argparse.Namespace], int] | None = None) -> int:
    """Run one verb; with `run`, call that with the verb's arguments instead.

    Returns the exit status: 0; 1 for a negative answer of verify, plan, audit or doctor, or a damaged checkpoint; 2
    for wrong input; 130 after Ctrl-C; or that of a run that ended early.
    """
    open_streams()
    argv = [*(sys.argv[1:] if argv is None else argv)]
    if not argv:
        say(_parser(argv).format_help().rstrip(), sys.stderr)
        return 2
    arguments = argparse.Namespace(verb="")
    with CtrlC() as ctrl_c:
        try:
            arguments = _parse(argv)
            if arguments.verb == "train":
                ctrl_c.end()  # a run takes signals as its launcher does
            import_plugins(arguments.plugins)
            status: int | None = (run or arguments.run)(arguments)
        except (ConfigError, EndedEarlyError, PluginError) as error:
            return _say_error(arguments, error)
        except BaseException:
            if not ctrl_c.seen:
                raise
            return _say_interrupted(argv)
        finally:
            if arguments.verb == "train":  # train's exit status decides whether it is started again
                drop_unwritten()
    return status or 0


def _say_interrupted(argv: Sequence[str]) -> int:
    verb = next(verb for verb in VERBS if verb.name in argv)
    line_of_its_own = "\n" if sys.stderr.isatty() else ""  # after the ^C that the terminal shows
    say_on_first_rank(f"{line_of_its_own}megamix {verb.name}: interrupted: {verb.on_interrupt}", sys.stderr)
    return INTERRUPTED


def _say_error(arguments: argparse.Namespace, error: ConfigError | EndedEarlyError | PluginError) -> int:
    # All ranks end early alike. Wrong input may be one rank's own, or be the RANK itself.
    tell = say_on_first_rank if isinstance(error, EndedEarlyError) else say_unless_first_did
    tell = say if getattr(error, "source", "") == "environment" else tell
    status: int = getattr(error, "exit_status", 2)
    if isinstance(error, ConfigError) and error.source in ("job", "plan"):  # name the configuration file instead
        error = ConfigError(error.problems, str(arguments.config))
    tell(f"megamix {arguments.verb}: {error}", sys.stderr)
    return status


def _parse(argv: list[str]) -> argparse.Namespace:
    """Return the parsed arguments.

    Overrides may stand behind a flag as well, where argparse takes no positional arguments. Everything after
    `--` is another program's command.
    """
    end = argv.index("--") if "--" in argv else len(argv)
    argv, command = argv[:end], argv[end + 1 :]
    arguments, rest = _parser(argv).parse_known_args(argv)
    if takes_overrides := hasattr(arguments, "overrides"):
        rest = arguments.overrides = [*arguments.overrides, *rest]
    if command and not hasattr(arguments, "command"):
        arguments.parser.error(f"{arguments.verb} runs no command, got -- {' '.join(command)}")
    if command:
        arguments.command = command
    unknown = [text for text in rest if not takes_overrides or "=" not in text or text.startswith("-")]
    if unknown:
        meant = override_meant(unknown) if takes_overrides else None
        fix = meant and f"settings are written section.key=value: {meant}"
        if arguments.verb == "train" and ("gpu" in unknown[0] or "proc" in unknown[0]):
            number = [*unknown[0].split("=")[1:], *unknown[1:2], "2"][0]
            fix = f"ranks are started by NPROC_PER_NODE={number} ./launch/pretrain.sh CONFIG"
        fix = fix or arguments.parser.flag_meant(unknown[0])
        arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}", fix)
    return arguments


def _overview() -> str:
    lines = ["Mixed-precision pretraining."]
    for task, verbs in VERBS_FOR.items():
        lines += ["", f"{task}:", *(f"  {verb.name:<12}{verb.help}" for verb in verbs)]
    return "\n".join(lines)


def _parser(argv: Sequence[str]) -> Parser:
    example = "megamix train configs/quickstart.toml checkpoint.folder=runs/mine"
    parser = Parser(
        prog="megamix", usage="megamix VERB ...", example=example, description=_overview(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True, help="megamix VERB --help tells more")
    for verb in VERBS:
        verb_parser = verbs.add_parser(verb.name, prog=f"megamix {verb.name}")
        if verb.name in argv:  # modules of other verbs would only cost time
            _learn(verb, verb_parser)
    return parser


def _learn(verb: Verb, parser: Parser) -> None:
    plugins = "modules to import first, as a,b; a saved run names them"
    parser.add_value("--plugins", "NAMES", lambda names: names.split(",") if names else [], plugins, default=[])
    module = importlib.import_module(f"megamix.cli.{verb.module}")
    getattr(module, f"{verb.name}_arguments")(parser)
    parser.set_defaults(run=getattr(module, f"run_{verb.name}"), parser=parser)
