"""The verb `bench`: runs what was asked for, prints a report of each and appends a line of JSON to a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megamix.bench.checkpoint_bench import CheckpointSettings, checkpoint
from megamix.bench.layout_bench import layout
from megamix.bench.report import Result, append_line, describe_machine
from megamix.bench.startup_bench import StartupSettings, startup
from megamix.bench.train_bench import TrainSettings, examine, fp16, overlap, train, wire
from megamix.bench.update_bench import UpdateSettings, update


def run(what: str, rounds: int, output: Path) -> None:
    """`what`: a bench, a layout of `bench train`, or "all". Each is reported and written as soon as it is done."""
    benches: dict[str, Callable[[], Result]] = {
        "update": lambda: update(UpdateSettings(rounds=rounds)),
        "train": lambda: train(TrainSettings(rounds=rounds)),
        "tp2": lambda: layout("tp2", rounds),
        "pp2": lambda: layout("pp2", rounds),
        "fp16": lambda: fp16(TrainSettings(rounds=rounds)),
        "overlap": lambda: overlap(TrainSettings(rounds=rounds)),
        "wire": lambda: wire(TrainSettings(rounds=rounds)),
        "examine": lambda: examine(TrainSettings(rounds=rounds, ranks=1)),
        "checkpoint": lambda: checkpoint(CheckpointSettings(rounds=rounds)),
        "startup": lambda: startup(StartupSettings(rounds=rounds)),
    }
    report([benches[name] for name in benches if what in (name, "all")], output)


def report(benches: list[Callable[[], Result]], output: Path) -> None:
    for bench in benches:
        machine = describe_machine()  # before the bench: its load is that of others
        result = bench()
        append_line(output, result.json_line(machine))
        print(f"{result.text()}\n", flush=True)
