"""The verb `config`: a configuration with every key that is read, the schema of one, or one with the present keys."""

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path

from megamix.base.durable import write_text
from megamix.cli.parser import Parser, add_config, lines_told
from megamix.config import ConfigError, config_schema, load_config
from megamix.config.load import read_file
from megamix.config.old_keys import upgraded_text
from megamix.data import installing


def config_arguments(parser: Parser) -> None:
    parser.example = "megamix config job.toml --show"
    add_config(parser, nargs="?")
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--show", action="store_true", help="the effective configuration, with every key that is read")
    kind.add_argument("--schema", action="store_true", help="JSON Schema of a configuration file")
    kind.add_argument("--upgrade", action="store_true", help="write the present keys into the file, for old ones")


@lines_told
def run_config(arguments: argparse.Namespace) -> Iterator[str]:
    if arguments.schema:
        yield json.dumps(config_schema(), indent=2)
        return
    if arguments.config is None:
        flag = "--upgrade" if arguments.upgrade else "--show"
        raise ConfigError([f"config: missing; write megamix config CONFIG {flag}"], "flags")
    if arguments.upgrade:
        if arguments.overrides or not os.path.isfile(arguments.config):
            problem = "--upgrade: rewrites one file, so overrides and pipes have no place; write megamix config FILE"
            raise ConfigError([f"{problem} --upgrade"], "flags")
        yield from _upgrade(Path(arguments.config))
        return
    config = load_config(arguments.config, arguments.overrides, say=lambda line: print(f"# {line}"))
    yield config.text.removesuffix("\n")


def _upgrade(path: Path) -> Iterator[str]:
    text, _ = read_file(path, f"config: got {path}")
    try:
        new, lines = upgraded_text(text)
    except ImportError:
        raise ConfigError([f"--upgrade: needs the package tomlkit; {installing('upgrade')}"], "flags") from None
    if lines:
        write_text(path.resolve(), new)
    yield from lines or [f"{path}: has no key of an earlier version"]
