"""How runs stand: one line for each, from files that grow while it trains. This module imports no torch."""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megamix.base.log_file import parsed
from megamix.base.progress import duration
from megamix.checkpoint.slots import SHARED, all_kept
from megamix.launch.run_folder import METRICS
from megamix.log.metrics import TAGS
from megamix.log.report.goodput import Goodput, read_goodput

_TAIL = 1 << 18  # bytes at the end of metrics.jsonl among which the last loss is looked for
_FORM = "{:<24} {:<10} {:>19} {:>8} {:>10} {:>10} {:>8}  {}"


def overview(folders: Sequence[Path]) -> Iterator[str]:
    """Yield a header, and a line for each folder; then what this user's runs keep in this machine's shared memory.
    Raises: ValueError or OSError if none of the folders is a run.
    """
    found = {folder: _goodput(folder) for folder in folders}
    refused = [one for one in found.values() if isinstance(one, ValueError | OSError)]
    if len(refused) == len(found):
        raise refused[0]
    yield _FORM.format("run", "state", "step", "loss", "tokens/s", "eta", "goodput", "reason").rstrip()
    for folder, goodput in found.items():
        name = folder.resolve().name[-24:]
        if isinstance(goodput, ValueError | OSError):
            yield _FORM.format(name, "none", *[""] * 5, str(goodput))
            continue
        row = _last_row(folder)
        last = goodput.starts[-1]
        loss, rate, left_s = (row.get(TAGS[name]) for name in ("loss", "tokens_per_s", "eta_s"))
        yield _FORM.format(
            name,
            last.state,
            f"{last.last:,}/{goodput.steps:,}",
            "" if loss is None else f"{loss:.4f}",
            "" if rate is None else f"{rate:,.0f}",
            "" if left_s is None or last.state != "running" else duration(left_s),
            f"{goodput.share:.1%}",
            last.reason.partition("\n")[0],
        ).rstrip()

    if kept := all_kept():
        yield f"in {SHARED} of {socket.gethostname()}"
    for one in sorted(kept, key=lambda one: one.folder):
        yield f"  {one.folder}: {one.size / 2**20:,.1f} MiB, update {one.update:,}{', lives' * one.lives}"


def _goodput(folder: Path) -> Goodput | ValueError | OSError:
    """Return a run's goodput; the error of a folder that is no run, or has just begun: others are told nevertheless."""
    try:
        return read_goodput(folder)
    except (ValueError, OSError) as error:
        return error


def _last_row(folder: Path) -> dict[str, Any]:
    """Return the last row of the metrics that has a loss; empty if there is none."""
    with suppress(OSError), (folder / METRICS).open("rb") as file:
        file.seek(-min(_TAIL, file.seek(0, os.SEEK_END)), os.SEEK_END)
        for line in reversed(file.read().splitlines()):
            if TAGS["loss"] in (row := parsed(line)):
                return row
    return {}
