"""What an H100 would run of a step, as tests/gpu/kernels.py compiles it without one.

`python docs/gpu_kernels.py` writes the table of docs/gpu.md.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "gpu.md"
MARK = "<!-- kernels: python docs/gpu_kernels.py writes it -->\n"
BANDWIDTH = 3.35e12  # bytes/s of an H100 SXM's memory
# Bytes an element by design: what is read and written once, and the logits twice.
DESIGN = {"AdamW": 26, "NAG": 18, "sum of 8": 20, "statistics,": 0, "loss": 10}
HEAD = "kernel | bytes an element | by design | registers | spills | bits an access | ms for 1e9 elements at 3.35 TB/s"


def _rows(kernels: Sequence[dict[str, Any]]) -> Iterator[str]:
    for kernel in kernels:
        name, moved = kernel["name"], kernel["bytes"]
        code = kernel["machine"]
        (design,) = (size for part, size in DESIGN.items() if part in name)
        gradient = {"FP32": 4, "BF16": 2, "FP16": 2}.get(name.split()[-1], 0) * ("sums in" in name)
        row = moved.get("row", 0) / 64 if "statistics" in name else 0
        total = moved["element"] + row
        widths = "128, slopes 64" if "loss" in name else "128"
        yield (
            f"| {name} | {total:g} | {design + gradient + row:g} | {code['registers']} | {code['spills']} "
            f"| {widths} | {1e12 * total / BANDWIDTH:.2f} |"
        )


def with_table(page: str, kernels: Sequence[dict[str, Any]]) -> str:
    """Return the text of the page with its table replaced by today's."""
    before, mark, after = page.partition(MARK)
    assert mark, "no place for the table"
    table = [f"| {HEAD} |", "|---" * (HEAD.count("|") + 1) + "|", *_rows(kernels)]
    rest = after.split("\n\n", 1)[1]
    return f"{before}{mark}" + "\n".join(table) + f"\n\n{rest}"


if __name__ == "__main__":
    sys.path.append(str(PAGE.parents[1]))
    from tests.gpu import h100

    with tempfile.TemporaryDirectory() as folder:
        h100.run("tests.gpu.kernels", Path(folder))
        found = json.loads((Path(folder) / "kernels.json").read_text())
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
