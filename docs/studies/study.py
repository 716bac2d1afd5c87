"""Share what all studies need: the flag, tables in columns, the figure as PNG.

A study is three functions: `measure(small)` gives its findings, `text(findings)` its tables, and `draw(findings,
figure)`, where a picture says more, fills a matplotlib Figure.
"""

from __future__ import annotations

import argparse
import email
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from megamix.data.prepare.corpus import Corpus, folder_files, named_corpus
from megamix.data.prepare.prepare_corpus import Request, prepare_corpus
from megamix.data.prepare.tokenizer_choice import TokenizerChoice
from megamix.tools.bench import report

ROOT = Path(__file__).parents[2]
FIGURES = Path(__file__).parent / "figures"


def main(
    script: str,
    measure: Callable[[bool], Any],
    text: Callable[[Any], str],
    draw: Callable[[Any, Any], None] | None = None,
) -> None:
    """Run a study as a command: its text goes to standard output, at full size its figure to figures/."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true", help="a few seconds' worth, without the figure")
    small = parser.parse_args().small
    # One thread: sums in one order, times that another process disturbs least, no handing over of tiny tensors.
    torch.set_num_threads(1)
    findings = measure(small)
    print(text(findings))
    if draw is not None and not small:
        save_figure(Path(script).stem, lambda figure: draw(findings, figure))


def save_figure(name: str, draw: Callable[[Any], None]) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"{name}: no figure, matplotlib is not installed (pip install -e '.[plot]')", file=sys.stderr)
        return
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    draw(figure)
    FIGURES.mkdir(exist_ok=True)
    # Without metadata the same figure is the same file, whichever matplotlib drew it.
    figure.savefig(FIGURES / f"{name}.png", dpi=100, metadata={"Software": None})


def prepare_text(small: bool, folder: Path) -> Path:
    """Where `train` and `valid` lie: the folder that the quickstart uses as well, prepared if it is not there.

    Small: a folder in `folder`, with the standard library's `email` in a vocabulary of 300.
    """
    if not small:
        stdlib = ROOT / "runs/data/stdlib"
        request = Request(tokenizer=TokenizerChoice("train", 2048), valid_fraction=0.05)
        return prepare_corpus(named_corpus("stdlib"), stdlib, request).output_dir
    sources = Corpus("the package email", folder_files(Path(email.__file__).parent, suffix=".py"))
    request = Request(tokenizer=TokenizerChoice("train", 300), valid_fraction=0.1)
    return prepare_corpus(sources, folder / "text", request).output_dir


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return aligned columns under a ruled heading; an empty cell is a dash, so that two spaces part any two cells."""
    heading, *lines = report.table(columns, [[cell or "-" for cell in row] for row in rows])
    return "\n".join([heading, "-" * len(heading), *lines])


def percent(share: float) -> str:
    if share == 0:
        return "0"
    return f"{100 * share:.1f} %" if share >= 0.01 else f"{100 * share:.3f} %" if share >= 1e-5 else "< 0.001 %"
