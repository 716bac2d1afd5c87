"""The engine against itself: an earlier tree's and this one's train the same configurations, and every bit is compared.

    git worktree add ../before COMMIT
    python -m tests.same_bits ../before                     # 200 configurations, some minutes on two cores
    python -m tests.same_bits ../before --count 60          # every pair of settings, in two minutes
    python -m tests.same_bits ../before --count 40 --only shard=parameters --only layout=dp1,dp2
    python -m tests.same_bits ../before --count 10 --only compile=True

Both sides train on this machine in this run, so no digest is kept and none goes stale. The configurations are a seeded
cover of all pairs of settings, then random ones. The first difference of each is named. Exit status: 0 if all are
equal, else 1.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from tests.same_bits.configurations import choose, pairs_of, restricted, tree_of, world_size

ROOT = Path(__file__).parents[2]
MOST_LINES = 12  # of a traceback


def start(tree, found, stack):
    """Start a side. Each has a cache of compiled code of its own, else one side would run what the other compiled."""
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="same-bits-"))
    own = {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": folder}
    command = [sys.executable, str(Path(__file__).parent / "worker.py")]
    pipe = subprocess.PIPE
    side = subprocess.Popen(command, cwd=folder, env={**os.environ, **own}, stdin=pipe, stdout=pipe, text=True)
    stack.enter_context(side)
    stack.callback(side.terminate)
    for one in found:
        side.stdin.write(json.dumps({"ranks": world_size(one), "tree": tree_of(one)}) + "\n")
    side.stdin.close()
    return side


def first_difference(old, new):
    """Return where two answers differ first, and in how many places in all; None where they do in none. An answer is
    the bits by place, or an `error`, which is a difference even where both have the same one.
    """
    for side, answer in (("old", old), ("new", new)):
        if "error" in answer:
            return f"the {side} tree failed:\n" + "\n".join(answer["error"].strip().splitlines()[-MOST_LINES:])
    wrong = [place for place in {**old, **new} if old.get(place) != new.get(place)]
    if not wrong:
        return None
    first = min(wrong, key=lambda place: place.partition(":")[0])
    said = f"{old.get(first, 'not told')} -> {new.get(first, 'not told')}"
    return f"{first}: {said}; places that differ: {len(wrong)}"


def compare(trees, found):
    """Train all on both sides; print the first difference of each, and a summary. Return how many are not equal."""
    equal = 0
    with ExitStack() as stack:
        sides = [start(tree, found, stack) for tree in trees]
        for one, *answers in zip(found, *(side.stdout for side in sides), strict=False):  # a side may die
            where = first_difference(*map(json.loads, answers))
            equal += where is None
            if where is not None:
                options = " ".join(f"--only {axis}={value}" for axis, value in one.items())
                print(f"DIFFERS --count 1 {options}\n    {where}", flush=True)
    print(f"{equal} of {len(found)} configurations equal")
    return len(found) - equal


def main(argv=None):
    parser = argparse.ArgumentParser(prog="tests.same_bits", description=__doc__.partition("\n")[0])
    parser.add_argument("old", type=Path, help="the tree to compare with, such as a worktree of an earlier commit")
    parser.add_argument("--count", type=int, default=200, help="configurations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", default=[], metavar="AXIS=VALUE,...", help="settings to stay with")
    arguments = parser.parse_args(argv)
    if not (arguments.old / "megamix/__init__.py").is_file():
        parser.error(f"{arguments.old} holds no megamix/__init__.py; give the root of a checkout")
    try:
        found = choose(restricted(arguments.only), arguments.count, arguments.seed)
    except ValueError as error:
        parser.error(str(error))
    print(f"{len(found)} configurations show {len(set().union(*map(pairs_of, found)))} pairs of settings")
    return min(1, compare([arguments.old.resolve(), ROOT], sorted(found, key=world_size)))


if __name__ == "__main__":
    sys.exit(main())
