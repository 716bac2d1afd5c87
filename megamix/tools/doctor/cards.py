"""NVIDIA cards of the machine, as the driver and torch describe them. torch may hang while it looks for cards, so it
does that in a process of its own.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megamix.tools.doctor.finding import Finding, found, not_here

_PCI = Path("/sys/bus/pci/devices")
_NVIDIA, _DISPLAY = "0x10de", "0x03"  # vendor; class of display and 3D controllers
_LIMIT_S = 50.0  # seconds, less than a check has
Card = dict[str, Any]  # by the driver's keys: name and driver_version are text, all others numbers

# By check: the key that the driver is asked for, and whether its value is wrong for a card.
_CHECKS: dict[str, tuple[str, Callable[[float, Card], bool]]] = {
    "power limit": ("power.limit", lambda watts, card: watts < 0.99 * card["power.default_limit"]),
    "throttled": ("clocks_event_reasons.active", lambda bits, card: bool(int(bits) & 0xE8)),
    "PCIe lanes": ("pcie.link.width.current", lambda lanes, card: lanes < card["pcie.link.width.max"]),
    "memory errors": ("ecc.errors.uncorrected.volatile.total", lambda errors, card: errors > 0),
    "used memory": ("memory.used", lambda mib, card: mib > 0.05 * card["memory.total"]),
}
_ASKED = ["name", "driver_version", "power.default_limit", "pcie.link.width.max", "memory.total"]
_ASKED += [key for key, _ in _CHECKS.values()]

_FACTS = """
import json, torch
cuda, has_cuda = torch.cuda, torch.version.cuda is not None
facts = {"torch": torch.__version__, "cuda": torch.version.cuda, "nccl": "", "problem": "", "cards": [], "apart": []}
try:
    if has_cuda:
        cuda.init()
        facts["nccl"] = ".".join(map(str, cuda.nccl.version()))
    facts["cards"] = [cuda.get_device_name(card) for card in range(cuda.device_count())]
    pairs = [(a, b) for b in range(len(facts["cards"]) if has_cuda else 0) for a in range(b)]
    facts["apart"] = [f"{a}-{b}" for a, b in pairs if not cuda.can_device_access_peer(a, b)]
except Exception as error:
    facts |= {"problem": str(error).splitlines()[0], "cards": []}
print(json.dumps(facts))
"""


def probe_pci() -> int:
    """Return how many NVIDIA cards are plugged in, with or without a driver."""
    kinds = [[(device / name).read_text().strip() for name in ("vendor", "class")] for device in _PCI.glob("*")]
    return sum(vendor == _NVIDIA and kind.startswith(_DISPLAY) for vendor, kind in kinds)


def ask_driver(*arguments: str) -> tuple[list[str], str]:
    """Return the lines that nvidia-smi prints, or why it prints none."""
    if shutil.which("nvidia-smi") is None:
        return [], "there is no nvidia-smi"
    run = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=_LIMIT_S)
    lines = run.stdout.strip().splitlines()
    return ([], (lines or ["nvidia-smi fails"])[0]) if run.returncode else (lines, "")


def probe_cards() -> tuple[list[Card], str]:
    """Return the driver's answers on each card, or why there are none.

    Drivers before 535 say throttle in place of event.
    """
    query = f"--query-gpu={','.join(_ASKED)}"
    for asked in (query, query.replace("event", "throttle")):
        lines, problem = ask_driver(asked, "--format=csv,noheader,nounits")
        if "not a valid field" not in problem:
            break
    rows = [dict(zip(_ASKED, map(str.strip, line.split(",")), strict=True)) for line in lines]
    return [{key: text if key in _ASKED[:2] else _number(text) for key, text in row.items()} for row in rows], problem


def _number(text: str) -> float:
    """Return the number in a text; 0 if the driver has none for this card, as in "[N/A]"."""
    if text.startswith("0x"):
        return int(text, 16)
    return float(text) if re.fullmatch(r"[0-9.]+", text) else 0.0


def judge_driver(plugged: int, cards: Sequence[Card], problem: str) -> Finding:
    """Find cards that are plugged in but that the driver does not have.

    The driver may have only some, as in a scheduler's share of a machine. A machine without cards trains on its CPU.
    """
    if not plugged and not cards:
        return not_here("driver", f"no NVIDIA card on the PCI bus, and {problem}")
    names = sorted({f"{card['name']}, driver {card['driver_version']}" for card in cards})
    seen = problem or f"{len(cards)} of {max(plugged, len(cards))} card(s): {'; '.join(names)}"
    return found("cards" if cards else "driver", seen, len(cards) < plugged or len(names) != 1)


def judge_cards(cards: Sequence[Card], checks: Sequence[str] = (*_CHECKS,), of: str = "") -> list[Finding]:
    """Judge every card by its own data. `of`: the moment of the reading."""
    findings = []
    for check in checks if cards else ():
        key, is_wrong = _CHECKS[check]
        bad = [f"card {number}: {card[key]:g}" for number, card in enumerate(cards) if is_wrong(card[key], card)]
        usual = ", ".join(sorted({f"{card[key]:g}" for card in cards}))
        findings.append(found(check, "; ".join(bad) or usual, bool(bad), of))
    return findings


def judge_links(lines: Sequence[str], apart: Sequence[str]) -> Finding:
    """Find pairs of cards without access to each other, or without NVLink if other pairs have it.

    `lines`: output of nvidia-smi topo -m. `apart`: pairs as 0-1.
    """
    rows = [re.findall(r"[A-Z]+\d*", line) for line in lines if re.match(r"\W*(\[4m)?GPU\d+\s+[XNPS]", line)]
    links = {f"{a}-{b}": row[1 + b] for a, row in enumerate(rows) for b in range(a + 1, len(rows))}
    if not links and not apart:
        return not_here("links", "there is one card, or none")
    has_nvlink = any(link.startswith("NV") for link in links.values())
    bad = [f"{pair} by {link}" for pair, link in links.items() if has_nvlink and not link.startswith("NV")]
    bad += [f"{pair} without peer access" for pair in apart]
    return found("links", "; ".join(bad) or ", ".join(sorted({*links.values()})), bool(bad))


def probe_torch() -> dict[str, Any]:
    """Return torch's data on itself and its cards; if it does not load, only the reason, under "problem".

    Raises: TimeoutExpired.
    """
    run = subprocess.run([sys.executable, "-c", _FACTS], capture_output=True, text=True, timeout=_LIMIT_S)
    if run.returncode:
        return {"problem": (run.stderr.strip().splitlines() or [f"ends with {run.returncode}"])[-1]}
    facts: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return facts


def judge_torch(facts: Mapping[str, Any], on_driver: int, visible: str | None) -> list[Finding]:
    """Find a torch that does not load, is too old, or does not use the cards.

    `on_driver`: number of cards that the driver has. `visible`: CUDA_VISIBLE_DEVICES.
    """
    if "torch" not in facts:
        return [found("torch", facts["problem"], True)]
    version, count = facts["torch"], len(facts["cards"])
    nccl = f", NCCL {facts['nccl']}" if facts["nccl"] else ""
    findings = [found("torch", f"{version}{nccl}", [*map(int, re.findall(r"\d+", version)[:2])] < [2, 11])]
    if on_driver:
        chosen = "" if visible is None else f", CUDA_VISIBLE_DEVICES {visible!r}"
        told = facts["problem"] or (facts["cuda"] or "a build for CPUs") + f", {count} of {on_driver} card(s){chosen}"
        listed = on_driver if visible is None else len([name for name in visible.split(",") if name.strip()])
        findings.append(found("torch's CUDA", told, count < max(1, listed)))
    return findings
