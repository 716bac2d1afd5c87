"""Write the table of docs/experts.md: `python docs/expert_kernels.py`. It holds what a GPU would run of a layer of
experts, as tests/gpu/expert_kernels.py counts it without one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).parent / "experts.md"
MARK = "<!-- parts: python docs/expert_kernels.py writes it -->\n"
BANDWIDTH, PEAK = 3.35e12, 989e12  # bytes/s of an H100 SXM's memory, and operations/s of its products in BF16
HEAD = "part | operations, forward / backward | GB, forward / backward | ms at 3.35 TB/s | ms at 989 TFLOP/s"


def _rows() -> Iterator[str]:
    from tests.gpu.expert_kernels import PRODUCTS, count

    (forward, backward), (some_forward, some_backward) = count(1), count(8)
    both = {part: (forward[part], backward[part]) for part in forward}
    both[f"{PRODUCTS}, `expert.size = 8`"] = some_forward[PRODUCTS], some_backward[PRODUCTS]
    for name, parts in both.items():
        operations = " / ".join(str(part.operations) for part in parts)
        gigabytes = " / ".join(f"{part.bytes / 1e9:.2f}" for part in parts)
        moving = 1e3 * sum(part.bytes for part in parts) / BANDWIDTH
        computing = 1e3 * sum(part.flops for part in parts) / PEAK
        yield f"| {name} | {operations} | {gigabytes} | {moving:.2f} | {computing:.2f} |"


def with_table(page: str) -> str:
    """Return the text of the page with its table replaced by today's."""
    before, mark, after = page.partition(MARK)
    assert mark, "no place for the table"
    table = [f"| {HEAD} |", "|---" * (HEAD.count("|") + 1) + "|", *_rows()]
    return f"{before}{mark}" + "\n".join(table) + "\n\n" + after.split("\n\n", 1)[1]


if __name__ == "__main__":
    sys.path.append(str(PAGE.parents[1]))
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
