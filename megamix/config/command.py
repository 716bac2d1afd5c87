"""The verb `config`: a configuration with every key that is read, or the schema of one."""

import argparse
import json
from collections.abc import Iterator

from megamix.arguments import Parser, add_config, lines_told
from megamix.config import ConfigError, config_schema, load_config


def config_arguments(parser: Parser) -> None:
    parser.example = "megamix config job.toml --show"
    add_config(parser, nargs="?")
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--show", action="store_true", help="the effective configuration, with every key that is read")
    kind.add_argument("--schema", action="store_true", help="JSON Schema of a configuration file")


@lines_told
def run_config(arguments: argparse.Namespace) -> Iterator[str]:
    if arguments.schema:
        yield json.dumps(config_schema(), indent=2)
        return
    if arguments.config is None:
        raise ConfigError(["config: missing; write megamix config CONFIG --show"], "flags")
    config = load_config(arguments.config, arguments.overrides, say=lambda line: print(f"# {line}"))
    yield config.text.removesuffix("\n")
