"""Page of a run, one HTML file to read, to send, or to open on a phone: how it ended, what it learned, and where its
time went. This module imports no torch, and matplotlib only where it is installed.
"""

from __future__ import annotations

import base64
import datetime
import json
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template

from megamix.base.durable import write_text
from megamix.base.progress import duration
from megamix.data import import_extra
from megamix.launch.ledger import DOWN, REDONE
from megamix.log.history import RunHistory, main_settings, read_history
from megamix.log.report.goodput import Goodput, OneStart, read_goodput, verdict

PAGE, NUMBERS = "page.html", "report.json"
_TEMPLATE = Template(Path(__file__).with_name("page_template.html").read_text(encoding="utf-8"))
_SHOWN = 50  # most starts in the table
_OF_A_STOP = "start, began, host, ranks, down before, from, seconds until, updates, lost, redone, end, cause"

# The meaning of each bucket, and what helps if its share is high.
_BUCKETS = {
    "trained": ("steps whose update the run has kept", ""),
    "overflow": ("attempts that overflowed and changed nothing", "see the loss scale; BF16"),
    "redone": ("updates after the last save, lost by a stop", "checkpoint.mirror, a smaller checkpoint.save_interval"),
    "start": (
        "from the launcher's start to the loop, without compiling",
        "fewer starts; local disks; checkpoint.mirror",
    ),
    "compile": (
        "compiling the update, and what a first attempt takes longer",
        "TORCHINDUCTOR_CACHE_DIR on a disk that stays",
    ),
    "validation": ("validations", "a larger training.eval_interval, fewer eval_batches"),
    "saving": ("saves, as far as training waited for them", "async_save, a larger save_interval"),
    "waiting": ("attempts that waited for data", "token files on a local disk"),
    "stalled": ("attempts beyond three times their usual time", "the stops' causes; the ranks' hosts"),
    "down": ("between the end of a start and the next one", "an earlier restart; spare nodes"),
}
# Caption of each picture: what it shows, and how to read it.
_CAPTIONS = {
    "loss": "Loss in nats per token, by update. Lower is better; a point is a loss on held-out text.",
    "scale": " The loss scale doubles while steps are clean, and halves at a cross: a step that overflowed.",
    "curves": "Learning rate, gradient norm, tokens per second. A jump of the norm often comes before one of the loss.",
    "range": "FP16's range by layer: gradients that are too small for it as they are, doublings left before one is too "
    "large, and updates that only the FP32 masters keep. Grey: no number.",
    "load": "Tokens of each expert over the layer's mean. 1 is even; an expert far below 0.1 learns nothing.",
    "communication": "Transfers of each bucket in one step. Pale: under way; full: time for which the step waited.",
}


def write_report(folder: Path, *, numbers: bool) -> Iterator[str]:
    """Write the page of a run into its folder; with `numbers` a JSON file beside it. Yield the verdict, then a line for
    each file; between them a line on a step's planned time, if the run has compared it.

    Raises: ValueError naming a folder that is no run; OSError.
    """
    goodput, history = read_goodput(folder), read_history(folder)
    yield verdict(goodput)
    if goodput.compared:
        yield goodput.compared
    pictures = dict[str, bytes]()
    try:
        import_extra("matplotlib", "plot", what="no pictures: ")
    except ValueError as error:
        yield str(error)
    else:
        from megamix.log.report.plot import figures, png

        pictures = {name: png(figure) for name, figure in figures(history).items()}
    write_text(folder / PAGE, _page(goodput, history, pictures))
    yield f"{folder / PAGE}"
    if numbers:
        values = {"verdict": verdict(goodput), "share": goodput.share, "wall_s": goodput.wall_s, **goodput._asdict()}
        values["starts"] = [one._asdict() for one in goodput.starts]
        write_text(folder / NUMBERS, json.dumps(values, indent=1) + "\n")
        yield f"{folder / NUMBERS}"


def _page(goodput: Goodput, history: RunHistory, pictures: Mapping[str, bytes]) -> str:
    scaled = _CAPTIONS["scale"] if history.loss_scale.steps else ""
    first, *others = [_picture(name, it, scaled if name == "loss" else "") for name, it in pictures.items()] or [""]
    facts = "".join(f"<tr><th>{name}</th><td>{escape(text)}</td></tr>" for name, text in _facts(goodput, history))
    config = f"<details><summary>All keys</summary><pre>{escape(history.config)}</pre></details>"
    parts = {
        "Facts": f"<table>{facts}</table>",
        "Where the time went": _buckets(goodput),
        "Starts and stops": _stops(goodput),
        "Further pictures": "".join(others),
        "The model writes": f"<pre>{escape(history.sample)}</pre>" if history.sample else "",
        "Configuration": config if history.config else "",
    }
    body = "".join(f"<h2>{title}</h2>{part}" for title, part in parts.items() if part)
    told = "".join(f"<p>{escape(line)}</p>" for line in (_cause(goodput.starts[-1]), goodput.compared) if line)
    return _TEMPLATE.substitute(
        name=escape(history.name), verdict=escape(verdict(goodput)), told=told, body=first + body
    )


def _picture(name: str, png: bytes, more: str) -> str:
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    caption = f"<figcaption>{_CAPTIONS[name]}{more}</figcaption>"
    return f'<figure><img alt="{name}" src="{source}">{caption}</figure>'


def _facts(goodput: Goodput, history: RunHistory) -> Iterator[tuple[str, str]]:
    """Yield name and text of each fact that is known: runs of earlier versions have fewer."""
    of_start, settings = goodput.facts, main_settings(history.config)
    if "parameters" in of_start:
        yield "parameters", f"{of_start['parameters']:,}"
    if history.tokens.values:
        yield "tokens", f"{history.tokens.values[-1]:,}"
    yield from ((name, str(of_start[name])) for name in ("ranks", "machine", "versions") if name in of_start)
    yield "duration", duration(goodput.wall_s)
    for section in ("model", "precision", "optimizer", "training", "parallelism"):
        own = {name.partition(".")[2]: value for name, value in settings.items() if name.startswith(section)}
        if {*own.values()} - {1}:  # parallelism: it is not worth a word if all sizes are 1
            yield section, ", ".join(f"{key} {value}" for key, value in own.items())
    if history.tokens_per_s.values:
        yield "throughput", f"{statistics.median(history.tokens_per_s.values):,.0f} tokens/s, the median"
    of_sets = [(f"validation loss, {name}", series) for name, series in history.valid_sets.items()]
    of_weights = ("validation loss", history.valid_loss), ("that of averaged weights", history.average_loss)
    for text, series in (("training loss", history.loss), *of_weights, *of_sets):
        if series.values:
            yield text, f"{series.values[-1]:.3f} nats a token at step {series.steps[-1]:,}"
    if history.loss_scale.steps or history.overflows.steps:
        yield "overflows", f"{len(history.overflows.steps)}, none of which moved a weight"


def _buckets(goodput: Goodput) -> str:
    rows = [
        [bucket, duration(seconds), f"{seconds / (goodput.wall_s or 1):.1%}", *_BUCKETS[bucket]]
        for bucket, seconds in goodput.seconds.items()
        if seconds >= 0.05
    ]
    return _table(["", "time", "share", "what it is", "what makes it less"], rows)


def _stops(goodput: Goodput) -> str:
    stopped = [one for one in goodput.starts if one.state not in ("finished", "running")]
    causes = Counter(one.ended for one in stopped).most_common()
    told = ", ".join(
        [f"{len(stopped)} stop{'s' * (len(stopped) != 1)}", *(f"{number} {state}" for state, number in causes)]
    )
    shown = goodput.starts[-_SHOWN:]
    if len(shown) < len(goodput.starts):
        told += f". The last {len(shown)} of {len(goodput.starts)} starts:"
    return f"<p>{escape(told)}</p>{_table(_OF_A_STOP.split(', '), [_stop(one) for one in reversed(shown)])}"


def _stop(one: OneStart) -> list[str]:
    down, lost, redone = one.seconds[DOWN], one.last - one.kept, one.seconds[REDONE]
    return [
        f"{one.starts}",
        datetime.datetime.fromtimestamp(one.t, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        one.host,
        one.ranks,
        duration(down) if down >= 0.05 else "",
        one.source,
        ", ".join(f"{kind} {at:.1f}" for kind, at in one.ready.items()),
        f"{one.first:,} to {one.last:,}",
        f"{lost:,}" if lost else "",
        duration(redone) if redone >= 0.05 else "",
        one.ended,
        _cause(one),
    ]


def _cause(one: OneStart) -> str:
    return one.reason.partition("\n")[0][:300]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{text}</th>" for text in heads)
    body = ""
    for row in rows:
        cells = (f'<td title="{head}">{escape(text)}</td>' for head, text in zip(heads, row, strict=True))
        body += f"<tr>{''.join(cells)}</tr>"
    return f'<table class="wide"><thead><tr>{head}</tr></thead>{body}</table>'
