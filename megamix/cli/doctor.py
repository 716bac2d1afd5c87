"""The verb `doctor`: it runs every check in turn, and prints one page of findings."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from megamix.base.console import drop_unwritten, print_lines
from megamix.base.durable import unwritable
from megamix.base.machine import set_torch_environment
from megamix.base.progress import ProgressLine
from megamix.cli.parser import Parser
from megamix.config import ConfigError
from megamix.tools.doctor import cards, first_light, host
from megamix.tools.doctor.finding import HANGS, Finding, expected, found, is_fit, not_here, run_check, summary

GPU_LIMIT_S, CPU_LIMIT_S = 600.0, 180.0  # seconds of all checks; a check that may take longer is left out
FIRST_LIGHT_LIMIT_S = 900.0
_HOST_LIMIT_S = 60.0  # seconds of one check of the machine
_NODES_LIMIT_S = 240.0
_MOMENT_S = 15.0  # seconds left for ending ranks that are out of time
_LEAST_S = 10.0  # seconds that a check begins with at least


def doctor_arguments(parser: Parser) -> None:
    parser.example = "megamix doctor --folder runs"
    parser.add_value("--folder", "DIR", Path, "where runs will be written (runs)", default=Path("runs"))
    parser.add_flag("--nodes", "compare and connect the ranks that torchrun has started")
    light = "all that the first run on a GPU should show, with a page and results to send, in this folder; 15 minutes"
    parser.add_value("--first-light", "OUT", Path, light)
    only = "only these checks, or parts of the first light (an unknown one lists all)"
    parser.add_argument("--only", metavar="A,B", default="", help=only)
    parser.add_value("--limit", "SECONDS", float, "of everything (600 with GPUs, 180 without; first light 900)")
    what = "a line a check at once, with what was looked at, seen and expected; at last whether the machine is fit"
    parser.add_flag("--json", what)


def run_doctor(arguments: argparse.Namespace) -> int:
    if arguments.nodes and "WORLD_SIZE" not in os.environ:
        fix = "write on every node torchrun --nnodes=2 --node-rank=0 --master-addr=node0 -m megamix doctor --nodes"
        raise ConfigError([f"--nodes: no launcher has started ranks; {fix}"], "flags")
    light = arguments.first_light
    on_gpu = light is not None and bool(cards.probe_torch().get("cards"))
    known = [*_machine(Path(), [], {}), *expected()["seconds"]]
    if light is not None:
        known = [part.name for part in first_light.parts(on_gpu=on_gpu)]
    only = [name.strip() for name in arguments.only.split(",") if name] or known
    if unknown := [name for name in only if name not in known]:
        raise ConfigError([f"--only: got {', '.join(unknown)}, known are {', '.join(known)}"], "flags")
    if arguments.limit is not None and arguments.limit <= 0:
        raise ConfigError([f"--limit: got {arguments.limit:g}, must be above 0; write --limit 120"], "flags")
    if light is not None:
        if problem := unwritable(light):
            raise ConfigError([f"--first-light: got {light}: {problem}; name a folder of yours"], "flags")
        return first_light.run(light, only, arguments.limit or FIRST_LIGHT_LIMIT_S, on_gpu=on_gpu)
    start_s, findings = time.monotonic(), list[Finding]()

    def lines() -> Iterator[str]:
        for finding in _nodes() if arguments.nodes else examine(arguments.folder, only, arguments.limit):
            findings.append(finding)
            yield from [json.dumps(asdict(finding))] if arguments.json else finding.lines()
        if arguments.json and findings:
            yield json.dumps({"fit": is_fit(findings)})
        elif findings:
            yield f"{summary(findings)}; {time.monotonic() - start_s:.0f} s"

    with ProgressLine("megamix doctor") as progress:
        print_lines(lines(), progress)
    status = int(not is_fit(findings))
    if (arguments.nodes and status) or any(thread.name == HANGS for thread in threading.enumerate()):
        drop_unwritten()
        os._exit(status)  # an ordinary exit would wait for threads or a group that hang, or die of them
    return status


def _nodes() -> Sequence[Finding]:
    from megamix.tools.doctor.nodes import examine_nodes

    return run_check("--nodes", examine_nodes, _NODES_LIMIT_S)


def _machine(folder: Path, seen: list[cards.Card], facts: dict[str, Any]) -> dict[str, Callable[[], list[Finding]]]:
    """Return the checks of the machine by name. They fill `seen` and `facts` with what driver and torch say."""

    def about_cards() -> list[Finding]:
        told, problem = cards.probe_cards()
        seen.extend(told)
        return [cards.judge_driver(cards.probe_pci(), seen, problem), *cards.judge_cards(seen)]

    def about_torch() -> list[Finding]:
        facts.update(cards.probe_torch())
        return cards.judge_torch(facts, len(seen), os.environ.get("CUDA_VISIBLE_DEVICES"))

    def about_ports() -> list[Finding]:
        port = host.meeting_port(os.environ)
        return host.judge_ports(*host.probe_ports(port), port)

    return {
        "cores": lambda: [host.judge_cores(os.getloadavg()[0])],
        "driver": about_cards,
        "torch": about_torch,
        "links": lambda: [cards.judge_links(cards.ask_driver("topo", "-m")[0], facts.get("apart", []))],
        "hostname": lambda: [host.judge_hostname(*host.probe_hostname())],
        "ports": about_ports,
        "/dev/shm": lambda: [  # Linux has it
            host.judge_shm(shutil.disk_usage(shm).free, gpus=bool(seen)) for shm in Path("/dev").glob("shm")
        ],
        "file system": lambda: host.judge_disk(*host.probe_disk(folder)),
    }


def examine(folder: Path, only: Sequence[str], limit_s: float | None) -> Iterator[Finding]:
    """Yield the findings of the checks named `only`, as they become known; of driver and torch, which other checks
    need, at least what is broken. `limit_s`: for all of them; None for the usual time.
    """
    start_s = time.monotonic()
    seen, facts = list[cards.Card](), dict[str, Any]()
    for name, run in _machine(folder, seen, facts).items():
        findings = run_check(name, run, _HOST_LIMIT_S) if name in (*only, "driver", "torch") else []
        yield from (one for one in findings if name in only or one.verdict == "broken")
    if "torch" not in facts:
        yield not_here("all else", "torch does not load")
        return
    set_torch_environment(len(facts["cards"]) or 2)
    from megamix.tools.doctor.measured import checks  # imports torch, which loads by now

    limit_s = limit_s or (GPU_LIMIT_S if facts["cards"] else CPU_LIMIT_S)
    with ExitStack() as stack:
        for name, (measure, usual_s) in checks(facts, stack).items():
            left_s = start_s + limit_s - _MOMENT_S - time.monotonic()
            if name not in only:
                continue
            if measure is None:
                yield not_here(name, "torch sees CUDA" if facts["cards"] else "torch sees no CUDA")
            elif left_s < _LEAST_S:
                yield found("time", f"no time is left: it may take {usual_s:.0f} s of {limit_s:.0f}", True, of=name)
            else:
                given_s = min(usual_s, left_s)
                may_last = given_s < usual_s or name not in ("collectives", "wire", "device")  # the compiler's time
                yield from run_check(name, partial(measure, given_s), given_s + _MOMENT_S, may_last=may_last)
