"""The engine against itself: an earlier tree's and this one's train the same configurations, and every bit is compared.

    git worktree add ../before COMMIT
    python -m tests.same_bits ../before                     # 200 configurations, some minutes on two cores
    python -m tests.same_bits ../before --count 40          # a minute
    python -m tests.same_bits ../before --count 40 --only shard=parameters --only layout=dp1,dp2
    python -m tests.same_bits ../before --product           # every combination of the engine's settings, on one rank

Both sides train on this machine in this run, so no digest is kept and none goes stale. The configurations are a seeded
cover of all pairs of settings, then random ones; with `--count` of 100 or more a handful of them is compiled and
another one on simulated GPUs. The first difference of each is named. Exit status: 0 if all are equal, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gpu import library
from tests.same_bits.compare import first_difference, lies_alike
from tests.same_bits.configurations import (
    AXES,
    NAMED,
    Configuration,
    allowed_pairs,
    choose,
    pairs_of,
    product,
    restricted,
    world_size,
)

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).parent / "worker.py"
TOLD_EVERY_S = 30.0


def chosen(arguments: argparse.Namespace) -> list[Configuration]:
    """Return the configurations with their numbers and seeds, small worlds first."""
    axes, count, seed = restricted(arguments.only), arguments.count, arguments.seed
    if arguments.product:
        found = product(axes, seed)
    else:
        named = [one for one in NAMED if not ("gpu" in one and library.missing())]
        named = named if count >= 100 and not arguments.only else []
        found = [*choose(axes, count - len(named), seed), *named]
    found = [{"number": number, "seed": f"{seed} {number}", **one} for number, one in enumerate(found)]
    if arguments.number is not None:
        found = [one for one in found if one["number"] in arguments.number]
    return sorted(found, key=lambda one: (one.get("gpu", False), world_size(one)))


def start(tree: Path, folder: Path, name: str) -> subprocess.Popen[bytes]:
    """Start a side. Each has a cache of compiled code of its own, else one side would run what the other compiled."""
    own = {
        "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONHASHSEED": "0",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / f"{name}_compiled"), "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_VEC_ISA_OK": "1", "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    command = [sys.executable, str(WORKER), str(tree), str(folder / "configurations"), str(folder / name)]
    return subprocess.Popen(command, cwd=folder, env={**os.environ, **own})


def answers(path: Path) -> dict[int, dict[str, Any]]:
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return {one["number"]: one for one in (json.loads(line) for line in lines if line.endswith("\n"))}


def compared(trees: dict[str, Path], found: Sequence[Configuration]) -> int:
    """Train all on both sides; print the first difference of each, and a summary. Return how many differ."""
    with tempfile.TemporaryDirectory(prefix="same-bits-") as place:
        folder, began_s = Path(place), time.monotonic()
        (folder / "configurations").write_text("".join(json.dumps(one) + "\n" for one in found))
        sides = {name: start(tree, folder, name) for name, tree in trees.items()}
        try:
            judged, different, moved = dict[int, Any](), 0, 0
            told_s = began_s
            while True:
                over = all(side.poll() is not None for side in sides.values())
                both = [answers(folder / name) for name in sides]
                for one in found:
                    number = one["number"]
                    if number in judged or not all(number in side for side in both):
                        continue
                    judged[number] = both[0][number]
                    moved += not lies_alike(*(side[number] for side in both))
                    if (where := first_difference(*(side[number] for side in both))) is not None:
                        different += 1
                        print(f"DIFFERS {number}: {described(one)}\n    {where}", flush=True)
                if time.monotonic() - told_s > TOLD_EVERY_S:
                    told_s = time.monotonic()
                    print(f"{len(judged)} of {len(found)}, {told_s - began_s:.0f} s", file=sys.stderr, flush=True)
                if over:
                    break
                time.sleep(0.5)
        finally:
            for side in sides.values():
                side.terminate()
                side.wait()
        if any("compiled" in one for one in found):
            for name in sides:
                assert any((folder / f"{name}_compiled").rglob("*.so")), f"the {name} tree's side has compiled nothing"
    for name, side in sides.items():
        if side.returncode:
            print(f"the {name} tree's side ended with {side.returncode}")
    attempts, skipped = (sum(one.get(key, 0) for one in judged.values()) for key in ("attempts", "skipped"))
    if moved:
        print(f"in {moved} configurations ranks own other elements: by_piece is not compared there")
    equal = len(judged) - different
    print(
        f"{equal} of {len(found)} configurations equal, {attempts} attempts, {skipped} skipped, "
        f"{time.monotonic() - began_s:.0f} s"
    )
    return len(found) - equal


def described(one: Configuration) -> str:
    return " ".join(f"{axis}={one[axis]}" for axis in [*AXES, "compiled", "gpu"] if axis in one)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.same_bits", description=__doc__.partition("\n")[0])
    parser.add_argument("old", type=Path, help="the tree to compare with, such as a worktree of an earlier commit")
    parser.add_argument("--count", type=int, default=200, help="configurations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", default=[], metavar="AXIS=VALUE,...", help="settings to stay with")
    parser.add_argument("--product", action="store_true", help="every combination of the engine's settings on one rank")
    parser.add_argument(
        "--number", type=int, action="append", help="of these numbers alone, as a difference names them"
    )
    parser.add_argument("--new", type=Path, default=ROOT, help="the other tree; this one unless given")
    arguments = parser.parse_args(argv)
    for tree in (arguments.old, arguments.new):
        if not (tree / "megamix/__init__.py").is_file():
            parser.error(f"{tree} holds no megamix/__init__.py; give the root of a checkout")
    found = chosen(arguments)
    if not arguments.product and arguments.number is None:
        want = allowed_pairs(restricted(arguments.only))
        have = set().union(*map(pairs_of, found))
        print(f"{len(found)} configurations show {len(want & have)} of {len(want)} pairs of settings")
    return min(1, compared({"old": arguments.old.resolve(), "new": arguments.new.resolve()}, found))


if __name__ == "__main__":
    sys.exit(main())
