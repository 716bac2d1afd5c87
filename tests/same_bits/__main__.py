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

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.gpu import library
from tests.same_bits.compare import first_difference, lies_alike
from tests.same_bits.configurations import (
    AXES,
    NAMED,
    WORLD_SIZES,
    allowed_pairs,
    choose,
    pairs_of,
    product,
    restricted,
)

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).parent / "worker.py"
TOLD_EVERY_S = 30.0


def chosen(arguments):
    """Return the configurations with their numbers and seeds, small worlds first.

    Raises: ValueError, as `restricted`.
    """
    axes, count, seed = restricted(arguments.only), arguments.count, arguments.seed
    if arguments.product:
        found = product(axes, seed)
    else:
        named = [one for one in NAMED if not ("gpu" in one and library.missing())]
        named = named if count >= 100 and not arguments.only else []
        found = [*choose(axes, count - len(named), seed), *named]
    wanted = range(len(found)) if arguments.number is None else arguments.number
    all_of_it = [
        {"number": number, "seed": f"{seed} {number}", "ranks": WORLD_SIZES[one["layout"]], **one}
        for number, one in enumerate(found)
        if number in wanted
    ]
    return sorted(all_of_it, key=lambda one: (one.get("gpu", False), one["ranks"]))


def start(tree, folder, name):
    """Start a side. Each has a cache of compiled code of its own, else one side would run what the other compiled."""
    own = {
        "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONHASHSEED": "0",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / f"{name}_compiled"), "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_VEC_ISA_OK": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    (folder / name).touch()
    command = [sys.executable, str(WORKER), str(tree), str(folder / "configurations"), str(folder / name)]
    return subprocess.Popen(command, cwd=folder, env={**os.environ, **own})


def answers(path, side):
    """Yield what a side writes, as it comes, until the side has ended."""
    line = ""
    with path.open() as lines:
        while True:
            over = side.poll() is not None
            line += lines.readline()
            if line.endswith("\n"):
                yield json.loads(line)
                line = ""
            elif over:
                return
            else:
                time.sleep(0.2)


def compare(trees, found):
    """Train all on both sides; print the first difference of each, and a summary. Return how many are not equal."""
    judged = different = moved = attempts = skipped = 0
    began_s = told_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="same-bits-") as place:
        folder = Path(place)
        (folder / "configurations").write_text("".join(json.dumps(one) + "\n" for one in found))
        sides = {name: start(tree, folder, name) for name, tree in trees.items()}
        try:
            told = [answers(folder / name, side) for name, side in sides.items()]
            for one, old, new in zip(found, *told, strict=False):  # a side may end before its time
                judged += 1
                moved += not lies_alike(old, new)
                attempts += old.get("attempts", 0)
                skipped += old.get("skipped", 0)
                if (where := first_difference(old, new)) is not None:
                    different += 1
                    print(f"DIFFERS {one['number']}: {described(one)}\n    {where}", flush=True)
                if time.monotonic() - told_s > TOLD_EVERY_S:
                    told_s = time.monotonic()
                    print(f"{judged} of {len(found)}, {told_s - began_s:.0f} s", file=sys.stderr, flush=True)
        finally:
            for name, side in sides.items():
                if judged < len(found):
                    side.terminate()
                if side.wait():
                    print(f"the {name} tree's side ended with {side.returncode}")
        if any("compiled" in one for one in found):
            for name in sides:
                assert any((folder / f"{name}_compiled").rglob("*.so")), f"the {name} tree's side has compiled nothing"
    if moved:
        print(f"in {moved} configurations ranks own other elements: by_piece is not compared there")
    equal = f"{judged - different} of {len(found)} configurations equal, {attempts} attempts, {skipped} skipped"
    print(f"{equal}, {time.monotonic() - began_s:.0f} s")
    return len(found) - judged + different


def described(one):
    return " ".join(f"{axis}={one[axis]}" for axis in [*AXES, "compiled", "gpu"] if axis in one)


def main(argv=None):
    parser = argparse.ArgumentParser(prog="tests.same_bits", description=__doc__.partition("\n")[0])
    parser.add_argument("old", type=Path, help="the tree to compare with, such as a worktree of an earlier commit")
    parser.add_argument("--count", type=int, default=200, help="configurations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", default=[], metavar="AXIS=VALUE,...", help="settings to stay with")
    parser.add_argument("--product", action="store_true", help="every combination of the engine's settings on one rank")
    parser.add_argument(
        "--number", type=int, action="append", help="of these numbers alone, as a difference names them"
    )
    arguments = parser.parse_args(argv)
    if not (arguments.old / "megamix/__init__.py").is_file():
        parser.error(f"{arguments.old} holds no megamix/__init__.py; give the root of a checkout")
    try:
        found = chosen(arguments)
    except ValueError as error:
        parser.error(str(error))
    if not arguments.product and arguments.number is None:
        want = allowed_pairs(restricted(arguments.only))
        have = set().union(*map(pairs_of, found))
        print(f"{len(found)} configurations show {len(want & have)} of {len(want)} pairs of settings")
    return min(1, compare({"old": arguments.old.resolve(), "new": ROOT}, found))


if __name__ == "__main__":
    sys.exit(main())
