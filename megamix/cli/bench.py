"""The verb `bench`. It imports torch only once its flags are checked."""

import argparse
from pathlib import Path

from megamix.base.durable import unwritable
from megamix.cli.parser import Parser
from megamix.config import ConfigError


def bench_arguments(parser: Parser) -> None:
    parser.example = "megamix bench train --rounds 15"
    benches = ["update", "train", "step", "host", "startup", "all"]
    parser.add_argument("what", choices=benches, nargs="?", default="train", help="what to measure (train)")
    where = "where: GPUs or CPU (GPUs where they are, for the benches that measure them)"
    parser.add_argument("--device", choices=["cuda", "cpu"], help=where)
    parser.add_argument(
        "--size", choices=["3M", "12M", "124M", "1.3B"], help="model of whole steps (124M; on a CPU 12M)"
    )
    parser.add_argument("--sides", metavar="A,B", default="", help="of whole steps: ours,plain,fsdp2,fp8_rowwise ...")
    parser.add_argument("--layout", choices=["tp2", "pp2", "cp2"], help="whole steps on two ranks that divide the work")
    parser.add_value("--rounds", "N", int, "turns of each side (15)", default=15)
    output = "lines of JSON are appended to it, one a round at once (runs/bench.jsonl)"
    parser.add_value("--output", "FILE", Path, output, default=Path("runs/bench.jsonl"))
    parser.add_flag("--json", "print these lines instead of the tables")


def run_bench(arguments: argparse.Namespace) -> None:
    problems = []
    if arguments.rounds < 1:
        problems.append(f"--rounds: got {arguments.rounds}, must be at least 1; write --rounds 15")
    if arguments.output.is_dir() or unwritable(arguments.output.parent):
        problems.append(f"--output: got {arguments.output}, which cannot be written; name a file in a folder of yours")
    if arguments.layout is not None and arguments.what != "train":
        problems.append(
            f"--layout: got {arguments.layout} with {arguments.what}, but only whole steps have a layout; "
            f"write megamix bench train --layout {arguments.layout}"
        )
    for flag in ("size", "sides"):
        if getattr(arguments, flag) and (arguments.what != "train" or arguments.layout):
            problems.append(f"--{flag}: only whole steps have it; write megamix bench train --{flag} ...")
    if problems:
        raise ConfigError(problems, "flags")
    from megamix.tools.bench.benches import run

    run(
        arguments.layout or arguments.what, arguments.rounds, arguments.output, as_json=arguments.json,
        device=arguments.device, size=arguments.size, sides=[name for name in arguments.sides.split(",") if name],
    )  # fmt: skip
