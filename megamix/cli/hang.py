"""The verb `hang`. It imports no torch."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from megamix.cli.parser import Parser, lines_told
from megamix.launch import hang


def hang_arguments(parser: Parser) -> None:
    parser.example = "megamix hang runs/mine"
    parser.add_value("folder", "RUN", Path, "folder of a run that failed on several ranks")
    parser.add_value("--torchfrtrace", "DIR", Path, "a new folder: records for torch's analyser")


@lines_told
def run_hang(arguments: argparse.Namespace) -> Iterator[str]:
    records = hang.read_records(arguments.folder)
    yield from hang.verdict(arguments.folder, records)
    if arguments.torchfrtrace is not None:
        hang.write_for_torchfrtrace(records, arguments.torchfrtrace)
        yield f"wrote {arguments.torchfrtrace}: torchfrtrace --allow-incomplete-ranks {arguments.torchfrtrace}"
