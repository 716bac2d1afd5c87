"""Benches by name: each runs, prints a report, and appends lines of JSON to a file: one at its begin and one for each
round at once, and one with all rounds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megamix.arguments import print_lines
from megamix.config import ConfigError
from megamix.machine import set_torch_environment
from megamix.progress import ProgressLine
from megamix.tools.bench.checkpoint_bench import checkpoint
from megamix.tools.bench.host_bench import HostSettings, host
from megamix.tools.bench.muon_bench import muon
from megamix.tools.bench.ranks import Settings
from megamix.tools.bench.report import Result, append_line, describe_machine, machine_line, progress
from megamix.tools.bench.sides import SIZES, Work, fitted, sides_at_once
from megamix.tools.bench.startup_bench import startup
from megamix.tools.bench.step_bench import step
from megamix.tools.bench.train_bench import SIDES, examine, fp16, layout, overlap, train, wire
from megamix.tools.bench.update_bench import GPT_20M, update

# Benches that measure GPUs, and how many they need; the others measure the host's work or arithmetic.
GPUS = {"update": 1, "train": 1, "examine": 1, "startup": 1, "overlap": 2, "wire": 2}
Bench = Callable[[Settings], Result]


def run(
    what: str, rounds: int, output: Path, *, as_json: bool = False, device: str | None = None,
    size: str | None = None, sides: Sequence[str] = (),
) -> None:  # fmt: skip
    """Run `what`: a bench, a layout of `bench train`, or "all". Each is reported and written as soon as it is done.

    `as_json`: the report is the lines of JSON. `device`: None for GPUs where they are and the bench measures them.
    `size` and `sides`: of `bench train`, by names.
    Raises: ConfigError.
    """
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if problem := _problem(what, cards, device, sides):
        raise ConfigError([problem], "flags")
    benches: dict[str, Bench] = {
        "update": update,
        "train": partial(train, names=sides),
        "step": step,
        "host": lambda settings: host(HostSettings(rounds=settings.rounds, tell=settings.tell)),
        **{name: partial(layout, name) for name in ("tp2", "pp2", "cp2")},
        "fp16": fp16,
        "overlap": overlap,
        "wire": wire,
        "muon": muon,
        "examine": lambda settings: examine(settings if settings.card else replace(settings, ranks=1)),
        "checkpoint": checkpoint,
        "startup": startup,
    }
    progress(f"megamix bench {what}: takes minutes: each side's first steps, then {rounds} rounds with the time left")
    chosen = {}
    for name in benches:
        on_gpus = device != "cpu" and 0 < GPUS.get(name, 0) <= cards
        if what in (name, "all") and (on_gpus or device != "cuda"):
            settings = on_cards(name, cards, size) if on_gpus else on_cores(name, size)
            chosen[name] = benches[name], replace(settings, rounds=rounds)
    report(chosen, output, as_json=as_json)


def _problem(what: str, cards: int, device: str | None, sides: Sequence[str]) -> str:
    """Return what is wrong about flags that only torch can judge."""
    if unknown := [name for name in sides if name not in SIDES]:
        return f"--sides: got {', '.join(unknown)}, known are {', '.join(SIDES)}"
    if device != "cuda" or what == "all":
        return ""
    if what not in GPUS:
        return f"--device: got cuda, but {what} measures the host; leave it out, or name one of {', '.join(GPUS)}"
    if cards < GPUS[what]:
        return f"--device: got cuda, but {what} needs {GPUS[what]} GPU(s), and torch sees {cards}; write --device cpu"
    return ""


def on_cores(name: str, size: str | None) -> Settings:
    """Return the settings of a bench of this machine's CPU."""
    return Settings(work=Work(model=GPT_20M) if name == "update" else SIZES[size or "12M"])


def on_cards(name: str, cards: int, size: str | None) -> Settings:
    """Return the settings of a bench of this machine's GPUs, as large as they hold."""
    set_torch_environment(cards)  # as a job's ranks have it
    memory = torch.cuda.get_device_properties(0).total_memory
    work = replace(SIZES[size or ("1.3B" if name == "update" else "124M")], device="cuda")
    # Beside the state, an update's bench holds torch's own gradients and moments, and two tensors to copy.
    work = fitted(work, memory / 4 if name == "update" else memory)
    ranks = 1 if name == "update" else cards
    at_once = sides_at_once(work, memory)
    return Settings(work=work, ranks=ranks, card=torch.cuda.get_device_name(0), at_once=at_once)


def report(benches: Mapping[str, tuple[Bench, Settings]], output: Path, *, as_json: bool = False) -> None:
    """Run benches with their settings, by name."""
    for name, (bench, settings) in benches.items():

        def tell(name: str = name, **figures: Any) -> None:
            write(json.dumps({"bench": name, **figures}))

        def write(line: str) -> bool:
            append_line(output, line)
            return not as_json or print_lines(iter([line]))

        machine = describe_machine(settings.card)  # before the bench, so that the load is that of other programs
        tell(machine=machine, settings=settings.described())
        with ProgressLine("megamix bench"):
            result = bench(replace(settings, tell=tell))
        printed = write(result.json_line(machine))
        if not as_json:
            printed = print_lines(iter([f"{result.text()}\n{machine_line(machine)}\n"]))
        if not printed:
            return
