"""The verbs `plot`, `report` and `status`. None imports torch."""

import argparse
import sys
import time
import webbrowser
from collections.abc import Iterator
from pathlib import Path

from megamix.cli.parser import Parser, lines_told
from megamix.data import import_extra


def plot_arguments(parser: Parser) -> None:
    parser.example = "megamix plot runs/mine"
    help = "a run's checkpoint.folder, finished or not; several share one picture of curves, in the first folder"
    parser.add_value("runs", "RUN", Path, help, nargs="+")


@lines_told
def run_plot(arguments: argparse.Namespace) -> Iterator[str]:
    import_extra("matplotlib", "plot")
    from megamix.log.report.plot import plot

    return plot(arguments.runs)


def report_arguments(parser: Parser) -> None:
    parser.example = "megamix report runs/mine"
    parser.add_value("folder", "RUN", Path, "a run's checkpoint.folder, finished or not")
    parser.add_flag("--json", "also write the numbers, as RUN/report.json")
    parser.add_flag("--open", "open the page in the browser")


@lines_told
def run_report(arguments: argparse.Namespace) -> Iterator[str]:
    from megamix.log.report.page import PAGE, write_report

    yield from write_report(arguments.folder, numbers=arguments.json)
    page = arguments.folder / PAGE
    if arguments.open and not webbrowser.open(page.resolve().as_uri()):
        yield f"there is no browser; open {page} where there is one"


def status_arguments(parser: Parser) -> None:
    parser.example = "megamix status runs/*"
    parser.add_value("runs", "RUN", Path, "the checkpoint.folder of a run", nargs="+")
    parser.add_value("--watch", "SECONDS", float, "look again every SECONDS until Ctrl-C")
    parser.add_flag("--clear", "remove what RUN keeps in this machine's shared memory; it must not live")


@lines_told
def run_status(arguments: argparse.Namespace) -> Iterator[str]:
    from megamix.launch.leftovers import clear
    from megamix.log.report.overview import overview

    if arguments.clear:
        yield from map(clear, arguments.runs)
        return
    while True:
        lines = [*overview(arguments.runs)]
        yield from [f"\x1b[H\x1b[J{lines[0]}", *lines[1:]] if arguments.watch and sys.stdout.isatty() else lines
        if not arguments.watch:
            return
        time.sleep(arguments.watch)
