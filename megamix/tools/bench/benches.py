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

from megamix.base.console import drop_unwritten, say
from megamix.base.machine import set_torch_environment
from megamix.base.progress import ProgressLine
from megamix.config import ConfigError
from megamix.tools.bench.host_bench import host
from megamix.tools.bench.ranks import Settings
from megamix.tools.bench.report import Result, append_line, describe_machine, machine_line, progress
from megamix.tools.bench.sides import SIDES, SIZES, Work, fitted, sides_at_once
from megamix.tools.bench.startup_bench import startup
from megamix.tools.bench.step_bench import step
from megamix.tools.bench.train_bench import layout, train
from megamix.tools.bench.update_bench import GPT_20M, update
from megamix.tools.ranks import num_cards

ON_GPUS = ("update", "train", "startup")  # benches that measure GPUs; the others measure the host's work
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
    cards = 0 if device == "cpu" else num_cards()
    on_gpus = ON_GPUS if cards else ()
    if device == "cuda" and (not on_gpus or what not in (*on_gpus, "all")):
        fix = f"name one of {', '.join(on_gpus)}" if on_gpus else "write --device cpu"
        raise ConfigError([f"--device: got cuda, but {what} is not measured on {cards} GPU(s); {fix}"], "flags")
    if unknown := [name for name in sides if name not in SIDES]:
        raise ConfigError([f"--sides: got {', '.join(unknown)}, known are {', '.join(SIDES)}"], "flags")
    benches: dict[str, Bench] = {
        "update": lambda s: update(s if s.card else replace(s, work=Work(model=GPT_20M))),
        "train": partial(train, names=sides),
        "step": step,
        "host": host,
        **{name: partial(layout, name) for name in ("tp2", "pp2", "cp2")},
        "startup": startup,
    }
    progress(f"megamix bench {what}: takes minutes: each side's first steps, then {rounds} rounds with the time left")
    chosen = {}
    for name, bench in benches.items():
        if what in (name, "all") and (name in on_gpus or device != "cuda"):
            settings = _settings(name, cards if name in on_gpus else 0, size)
            chosen[name] = bench, replace(settings, rounds=rounds)
    report(chosen, output, as_json=as_json)


def _settings(name: str, cards: int, size: str | None) -> Settings:
    """Return the settings of a bench of the CPU or of `cards` GPUs: the work is as large as they hold.

    Beside the state an update's bench holds torch's own gradients and moments, and what it copies: four times as much.
    """
    if not cards:
        return Settings(work=SIZES[size or "12M"])
    set_torch_environment(cards)  # as a job's ranks have it
    memory, alone = torch.cuda.get_device_properties(0).total_memory, name == "update"
    work = fitted(replace(SIZES[size or ("1.3B" if alone else "124M")], device="cuda"), memory / (4 if alone else 1))
    card, at_once = torch.cuda.get_device_name(0), max(1, sides_at_once(work, memory))
    return Settings(work=work, ranks=1 if alone else cards, card=card, at_once=at_once)


def report(benches: Mapping[str, tuple[Bench, Settings]], output: Path, *, as_json: bool = False) -> None:
    for name, (bench, settings) in benches.items():

        def tell(name: str = name, **figures: Any) -> None:
            write(json.dumps({"bench": name, **figures}))

        def write(line: str) -> None:
            append_line(output, line)
            if as_json:
                say(line)

        machine = describe_machine(settings.card)  # before the bench, so that the load is that of other programs
        tell(machine=machine, settings=settings.described())
        with ProgressLine("megamix bench"):
            result = bench(replace(settings, tell=tell))
        write(result.json_line(machine))
        if not as_json:
            say(f"{result.text()}\n{machine_line(machine)}\n")
    drop_unwritten()
