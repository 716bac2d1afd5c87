"""The verb `plot`. It imports matplotlib only when it runs."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from megamix.arguments import Parser, lines_told
from megamix.data import import_extra


def plot_arguments(parser: Parser) -> None:
    parser.example = "megamix plot runs/mine"
    help = "a run's checkpoint.folder, finished or not; several share one picture of curves, in the first folder"
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help=help)


@lines_told
def run_plot(arguments: argparse.Namespace) -> Iterator[str]:
    import_extra("matplotlib", "plot")
    from megamix.report.plot import plot

    return plot(arguments.runs)
