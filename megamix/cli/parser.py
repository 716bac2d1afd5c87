"""Common parts of the verbs: parsers whose errors say what to write, and how the lines of a verb are told."""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megamix.base.console import print_lines, say
from megamix.base.progress import ProgressLine
from megamix.config import nearest
from megamix.plugins import PluginError

_ELSEWHERE = {
    "dcp": "megamix checkpoint export runs/mine --to dcp exported", "hf": "megamix export runs/mine --to hf hf/mine",
}  # fmt: skip  # by export format


class Parser(argparse.ArgumentParser):
    """Parser of a verb's arguments. `example`: a command that works, with which the help and every error end."""

    def __init__(self, *, example: str = "", **settings: Any):
        super().__init__(**settings)
        self.example = example

    def format_help(self) -> str:
        self.epilog = f"for example: {self.example}"
        return super().format_help()

    def flag_meant(self, word: str) -> str | None:
        """Return a question that names the nearest flag of this parser or of one below it; None if none is near."""
        flag = word.partition("=")[0]
        near = nearest(flag, self._flags()) if flag.startswith("--") else None
        return f"did you mean {near}? write for example {self.example}" if near else None

    def _flags(self) -> list[str]:
        choices = [action.choices for action in self._actions if isinstance(action.choices, dict)]  # those of verbs
        own = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
        return [*own, *(flag for parsers in choices for parser in parsers.values() for flag in parser._flags())]

    def add_flag(self, name: str, help: str) -> None:
        self.add_argument(name, action="store_true", help=help)

    def add_value(self, name: str, metavar: str, type: Callable[[str], Any], help: str, **settings: Any) -> None:
        self.add_argument(name, metavar=metavar, type=type, help=help, **settings)

    def error(self, message: str, fix: str | None = None) -> NoReturn:
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        if choice and (near := nearest(choice[1], re.findall(r"[\w-]+", choice[2]))):
            fix = f"did you mean {near}? write for example {self.example}"
        if choice and choice[1] in _ELSEWHERE:
            fix = f"write {_ELSEWHERE[choice[1]]}"
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: {message}; {fix or f'write for example {self.example}'}\n")


def add_config(parser: Parser, help: str = "TOML file", nargs: str | None = None) -> None:
    parser.add_value("config", "CONFIG", Path, help, nargs=nargs)
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", default=[], help="win over the file")


def check_plugins(arguments: argparse.Namespace, plugins: Sequence[str]) -> None:
    """Refuse plugins of `--plugins` that the configuration does not name.

    Saved files and started processes would not know of them.
    """
    if unknown := [name for name in arguments.plugins if name not in plugins]:
        fix = f"write plugins = {json.dumps([*plugins, *unknown])} on top of {arguments.config}"
        raise PluginError(f"plugins: {', '.join(unknown)} named by --plugins alone; {fix}")


def lines_told(verb: Callable[[argparse.Namespace], Iterator[str]]) -> Callable[[argparse.Namespace], int]:
    """Return a function that prints the verb's lines and returns the exit status.

    Errors end the verb with a message: those of its input or of the disk with status 2, a damaged checkpoint with 1.
    The verb finds its progress in `arguments.progress`.
    """

    def run(arguments: argparse.Namespace) -> int:
        action = getattr(arguments, "action", None)
        name = f"megamix {arguments.verb} {action}" if action else f"megamix {arguments.verb}"
        try:
            with ProgressLine(name) as arguments.progress:
                return 0 if print_lines(verb(arguments), arguments.progress) else 1
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            say(f"{name}: {where}{error.strerror or error}; correct that and run the same command again", sys.stderr)
            return 2
        except ValueError as error:  # an error by the contract of the called function
            from megamix.checkpoint.manifest import DamagedCheckpoint

            if isinstance(error, DamagedCheckpoint):
                print(f"{name}: damaged", *error.problems, sep="\n  ", file=sys.stderr)
                return 1
            say(f"{name}: {error}", sys.stderr)
            return 2

    return run
