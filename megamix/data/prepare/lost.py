"""The account of what is left out of a corpus: files that cannot be read and bad records, in bytes and with reasons."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megamix.base.durable import write_text
from megamix.data.prepare.corpus import counted
from megamix.data.prepare.plan import PlannedFile
from megamix.data.prepare.records import BadRecord

BAD_RECORDS_NAME = "bad_records.jsonl"
_UNITS = {"jsonl": "line", "json": "record"}
_REASONS = 4  # kinds of reasons that a message gives
Line = dict[str, Any]


def line_of(planned: PlannedFile, number: int, record: BadRecord) -> Line:
    """Return a line of the list: the path, the place in it, the reason, the bytes, and whether the file cannot be read
    to its end. Such a file counts whole, for nobody knows what it lacks.
    """
    place = {} if planned.fault or planned.file.kind == "text" else {_UNITS.get(planned.file.kind, "row"): number}
    whole = record.num_bytes is None
    num_bytes = planned.full_bytes if whole else record.num_bytes
    return {"path": planned.file.path, **place, "reason": record.reason, "num_bytes": num_bytes, "whole_file": whole}


def count_losses(lines: Sequence[Line], sizes: Mapping[str, int]) -> dict[str, float]:
    """Return the number of lost files, lost bytes, and their share in percent. `sizes`: bytes of each file. No file
    loses more: records of a compressed one count uncompressed.
    """
    lines, lost = _counted_once(lines), Counter[str]()
    for line in lines:
        lost[line["path"]] += line["num_bytes"]
    num_bytes = sum(min(size, sizes[path]) for path, size in lost.items())
    num_files = sum(line["whole_file"] for line in lines)
    return {"num_files": num_files, "num_bytes": num_bytes, "percent": 100 * num_bytes / max(sum(sizes.values()), 1)}


def told_losses(lines: Sequence[Line]) -> str:
    """Return the number of files and of bad records for each kind of reason, their bytes and the first of them."""
    groups = dict[tuple[bool, str], list[Line]]()
    for line in _counted_once(lines):
        groups.setdefault((line["whole_file"], re.split("[:;(]", line["reason"])[0]), []).append(line)
    told = []
    for group in sorted(groups.values(), key=_num_bytes, reverse=True):
        first = group[0]
        place = "".join(f" {unit} {first[unit]}" for unit in ("line", "record", "row") if unit in first)
        number = counted(len(group), "file" if first["whole_file"] else "bad record")
        told.append(f"{number} ({_num_bytes(group):,} bytes), the first: {first['path']}{place}: {first['reason']}")
    if len(told) > _REASONS:
        told[_REASONS:] = [f"other reasons: {len(told) - _REASONS}"]
    return "; ".join(told)


def check_losses(
    lines: Sequence[Line],
    sizes: Mapping[str, int],
    max_bad_records: int,
    allow_lost: float,
    side_file: Path | None = None,
) -> None:
    """Refuse to leave out more than is allowed. `side_file`: lists all that was found.

    Raises: ValueError naming both limits where both are passed.
    """
    percent = count_losses(lines, sizes)["percent"]
    passed = [f"{percent:.2f} % of the bytes, more than --allow-lost {allow_lost:g},"] if percent > allow_lost else []
    if len(lines) > max_bad_records:
        passed.append(f"more than --max-bad-records {max_bad_records} bad records or files")
    if not passed:
        return
    fix = "correct them, or give a higher limit"
    if side_file:
        write_lines(side_file, lines)
        fix = f"those found so far lie in {side_file}; {fix}: what is encoded is kept"
    raise ValueError(f"{' and '.join(passed)} cannot be read: {told_losses(lines)}; {fix}")


def write_lines(path: Path, lines: Sequence[Line]) -> None:
    write_text(path, "".join(json.dumps(line) + "\n" for line in lines))


def _counted_once(lines: Sequence[Line]) -> list[Line]:
    """Return the lines without those that would count bytes twice: each lost file once, and none of its records."""
    files = {line["path"]: line for line in reversed(lines) if line["whole_file"]}
    return [line for line in lines if files.get(line["path"], line) is line]


def _num_bytes(lines: Sequence[Line]) -> int:
    return sum(line["num_bytes"] for line in lines)
