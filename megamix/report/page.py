"""Page of a run to show to others: one HTML file with the facts, the pictures, the sample and the configuration."""

from __future__ import annotations

import base64
import json
import statistics
import tomllib
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from megamix.report.history import RunHistory
from megamix.run.run_folder import CONFIG, SAMPLE
from megamix.supervise.status import STATUS

PAGE = "page.html"
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "img{width:100%}pre{background:#f4f4f4;padding:1rem;overflow-x:auto}"
    "th{text-align:left;padding-right:2rem;font-weight:600}"
)


def run_page(folder: Path, history: RunHistory, pictures: Sequence[Path]) -> str:
    """Return the page of the run in a folder. `pictures`: PNG files, which it holds itself."""
    name = escape(folder.resolve().name)
    config, sample = _text(folder / CONFIG), _text(folder / SAMPLE)
    rows = "".join(f"<tr><th>{key}</th><td>{escape(value)}</td></tr>" for key, value in _facts(folder, config, history))
    images = "".join(f'<img alt="{picture.stem}" src="data:image/png;base64,{_png(picture)}">' for picture in pictures)
    written = f"<h2>The model writes</h2><pre>{escape(sample)}</pre>" if sample else ""
    settings = f"<details><summary>Configuration</summary><pre>{escape(config)}</pre></details>" if config else ""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title><style>{_STYLE}</style>'
        f"<h1>{name}</h1><table>{rows}</table>{images}{written}{settings}</html>\n"
    )


def _facts(folder: Path, config: str, history: RunHistory) -> Iterator[tuple[str, str]]:
    tables: dict[str, Any] = tomllib.loads(config)
    status: dict[str, Any] = json.loads(_text(folder / STATUS) or "{}")
    if status:
        yield "state", f"{status['state']} after update {status['update']} of {status['steps']}, {status['time']}"
    for section, keys in (
        ("model", ("family", "num_layers", "hidden_size", "vocab_size", "seq_len")),
        ("precision", ("dtype",)),
        ("optimizer", ("name", "lr")),
        ("training", ("global_batch_size", "seed")),
    ):
        there = [(key, tables[section][key]) for key in keys if key in tables.get(section, {})]
        if there:
            yield section, ", ".join(f"{key} {value}" for key, value in there)
    of_sets = [(f"validation loss, {name}", series) for name, series in history.valid_sets.items()]
    of_weights = ("validation loss", history.valid_loss), ("that of averaged weights", history.average_loss)
    for text, series in (*of_weights, *of_sets, ("training loss", history.loss)):
        if series.values:
            yield text, f"{series.values[-1]:.3f} nats a token at step {series.steps[-1]}"
    if history.tokens.values:
        yield "tokens", f"{history.tokens.values[-1]:,.0f}"
    if history.tokens_per_s.values:
        yield "throughput", f"{statistics.median(history.tokens_per_s.values):,.0f} tokens/s, the median"
    yield "overflows", f"{len(history.overflows.steps)} attempt(s), none of which moved a weight"
    if history.resumed.steps:
        yield "resumed", f"at step {', '.join(map(str, history.resumed.steps))}"


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _png(picture: Path) -> str:
    return base64.b64encode(picture.read_bytes()).decode()
