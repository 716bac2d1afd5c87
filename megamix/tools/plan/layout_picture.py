"""Picture of the fastest layout on each number of GPUs: what a token costs, by the parts of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

COLOURS = {
    "products": "#4c78a8",
    "attention": "#72b7b2",
    "between": "#9ecae9",
    "recompute": "#b07aa1",
    "tp": "#e08a1e",
    "cp": "#f2c14e",
    "ep": "#9c755f",
    "bubble": "#7f8fa6",
    "dp": "#d1495b",
    "update": "#2a9d5c",
    "host": "#3b3b3b",
    "fixed": "#bbbbbb",
}
LEFT, WIDE, ROW = 70, 620, 28  # pixels: where bars begin, the longest one with its band, and a row's height


def picture(title: str, records: Sequence[Mapping[str, Any]]) -> str:
    """Return an SVG with a bar for each record of `plan --gpus --json`. It is as long as a GPU's time for a token, with
    a colour for each part of a step; the line at its end is the band.
    """
    scale = WIDE / max((1 + record["band"]) / record["tokens_per_s"] for record in records)
    drawn = [f'<text x="8" y="20" font-size="15">{escape(title)}: GPU time for a token</text>']
    for number, record in enumerate(records):
        x, y, long = float(LEFT), 34 + ROW * number, scale / record["tokens_per_s"]
        drawn.append(f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{record["gpus"]:,}</text>')
        for part, colour in COLOURS.items():
            share = record["parts_s"][part] / record["step_s"]
            box = f'x="{x:.1f}" y="{y}" width="{share * long:.1f}" height="20" fill="{colour}"'
            drawn.append(f"<rect {box}><title>{part}: {share:.1%} of the step</title></rect>")
            x += share * long
        ends = [LEFT + long * (1 + side * record["band"]) for side in (-1, 1)]
        drawn.append(f'<path d="M{ends[0]:.1f} {y + 10}H{ends[1]:.1f}" stroke="#222"/>')
        words = f"{record['tokens_per_s']:,.0f} tokens/s a GPU, {record['mfu']:.1%} MFU, {record['step_s']:.3g} s"
        drawn.append(f'<text x="{LEFT + WIDE + 10}" y="{y + 15}">{words}</text>')
    y = 44 + ROW * len(records)
    for number, (part, colour) in enumerate(COLOURS.items()):
        x = 8 + 82 * number
        drawn.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>')
        drawn.append(f'<text x="{x + 16}" y="{y + 11}">{part}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 {y + 24}" font-family="sans-serif" font-size="12">'
        f'<rect width="1000" height="{y + 24}" fill="white"/>{"".join(drawn)}</svg>\n'
    )
