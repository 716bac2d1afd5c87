"""Benches by name: each runs, prints a report and appends a line of JSON to a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from megamix.arguments import print_lines
from megamix.progress import ProgressLine
from megamix.tools.bench.checkpoint_bench import checkpoint
from megamix.tools.bench.host_bench import HostSettings, host
from megamix.tools.bench.muon_bench import muon
from megamix.tools.bench.ranks import Settings
from megamix.tools.bench.report import Result, append_line, describe_machine, machine_line, progress
from megamix.tools.bench.sides import Work
from megamix.tools.bench.startup_bench import startup
from megamix.tools.bench.step_bench import step
from megamix.tools.bench.train_bench import examine, fp16, layout, overlap, train, wire
from megamix.tools.bench.update_bench import GPT_20M, update


def run(what: str, rounds: int, output: Path, *, as_json: bool = False) -> None:
    """Run `what`: a bench, a layout of `bench train`, or "all". Each is reported and written as soon as it is done.

    `as_json`: the report is the line of JSON.
    """
    settings = Settings(rounds=rounds)
    benches: dict[str, Callable[[], Result]] = {
        "update": lambda: update(replace(settings, work=Work(model=GPT_20M))),
        "train": lambda: train(settings),
        "step": lambda: step(settings),
        "host": lambda: host(HostSettings(rounds=rounds)),
        "tp2": lambda: layout("tp2", rounds),
        "pp2": lambda: layout("pp2", rounds),
        "cp2": lambda: layout("cp2", rounds),
        "fp16": lambda: fp16(settings),
        "overlap": lambda: overlap(settings),
        "wire": lambda: wire(settings),
        "muon": lambda: muon(settings),
        "examine": lambda: examine(Settings(rounds=rounds, ranks=1)),
        "checkpoint": lambda: checkpoint(settings),
        "startup": lambda: startup(settings),
    }
    progress(f"megamix bench {what}: takes minutes: each side's first steps, then {rounds} rounds with the time left")
    report([benches[name] for name in benches if what in (name, "all")], output, as_json=as_json)


def report(benches: list[Callable[[], Result]], output: Path, *, as_json: bool = False) -> None:
    for bench in benches:
        machine = describe_machine()  # described before the bench, so that the load is that of other programs
        with ProgressLine("megamix bench"):
            result = bench()
        line = result.json_line(machine)
        append_line(output, line)
        if not print_lines(iter([line if as_json else f"{result.text()}\n{machine_line(machine)}\n"])):
            return
