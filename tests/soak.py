"""A long run under fire: `python -m tests.soak [--steps 2000] [--every 40] [--seed N]`.

A small two-rank job trains without a fault, and is watched for growth. Then it trains again, in another folder, while
about every 40 attempts a fault strikes; whatever ends it, the same command starts it again. It must come to the same
end: every logged number, every bit of the weights and moments. The seed says which faults strike where; a signal comes
up to 50 ms after that, so at another instant in every soak.
"""

import argparse
import json
import random
import secrets
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from megamix.checkpoint.folder import set_aside, unfinished
from megamix.checkpoint.slots import home_of, remove_home
from megamix.launch.run_status import read_status
from tests.builders import EXPERTS, tiny_job, write_data
from tests.train.fresh_ranks import FreshRanks
from tests.train.outcome import differences, end_of
from tests.train.strikes import DAMAGES, KINDS, RANKS, Fault, Strikes, damage_newest, draw_faults

TIMEOUT_S = 5.0  # after which a rank that stands still ends the run
DEADLINE_S = 3600.0  # of one start: a soak that hangs must end
MAX_GROWTH = 0.05


class Usage(NamedTuple):
    """Of one process at one instant."""

    descriptors: int
    threads: int
    memory_mib: float  # its own: without what is mapped from files

    @staticmethod
    def now():
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        descriptors = len(list(Path("/proc/self/fd").iterdir()))
        return Usage(descriptors, int(lines["Threads"]), int(lines["RssAnon"].split()[0]) / 1024)


class Watch:
    """Called on every rank before each attempt; writes down what the process uses."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, rank, number):
        with (self.folder / f"usage{rank}.jsonl").open("a") as log:
            log.write(json.dumps(Usage.now()) + "\n")

    def ends(self, rank):
        """The least in the second and in the last tenth of all attempts. The first tenth is for warming up, and a save
        under way takes a thread and files of its own, which come and go.
        """
        rows = [json.loads(line) for line in (self.folder / f"usage{rank}.jsonl").read_text().splitlines()]
        tenth = len(rows) // 10
        first, last = (Usage(*map(min, zip(*part, strict=True))) for part in (rows[tenth : 2 * tenth], rows[-tenth:]))
        return first, last


def growth(watch):
    return [
        f"rank {rank}: {what} grew from {first:g} to {last:g}"
        for rank in range(RANKS)
        for what, first, last in zip(Usage._fields, *watch.ends(rank), strict=True)
        if last > first * (1 + MAX_GROWTH)
    ]


def soak_config(folder, steps, every):
    """A small job with all that a run may carry over: dropout, overflows, biases of experts, validations, saves beside
    training, a mirror in memory.
    """
    return tiny_job(
        folder,
        tokens=folder.parent / "data",
        dropout=0.1,
        recompute="full",
        experts=EXPERTS,
        loss_scale={"init_scale": 2.0**14, "growth_interval": 20},
        steps=steps,
        global_batch_size=4,
        eval_interval=50,
        eval_batches=1,
        timeout_s=TIMEOUT_S,
        expert={"size": RANKS},
        save_interval=every // 4,
        mirror=1,
        replica_check_interval=25,
        log_interval=1,
        precision_interval=100,
    )


class Fight(NamedTuple):
    """Outcome of the run under fire."""

    struck: list[Fault]
    starts: int
    failed_saves: int
    from_memory: int  # starts
    surprises: list[str]  # for each start that ended in another way than its fault should end it


def train_under_fire(config, faults, rng):
    """Start it until it has finished, or often enough for that."""
    folder = Path(config.checkpoint.folder).parent
    log = folder / "struck.txt"
    log.touch()
    failed_saves, from_memory, struck, surprises = 0, 0, 0, []
    for start in range(1, 2 * len(faults) + 2):
        ranks = FreshRanks(config, RANKS, Strikes(faults[struck:], log))
        statuses = ranks.join(DEADLINE_S)
        failed_saves += ranks.said(0).count("checkpoint NOT saved")
        from_memory += "goes on from memory" in ranks.said(0)
        before, struck = struck, len(log.read_text().splitlines())
        fault = faults[struck - 1] if struck > before else None
        told = f"start {start}: {fault or 'no fault'}: ended with {statuses}"
        print(told, flush=True)
        if set(statuses) == {0}:
            break
        if fault is None or not fault.ends_as_told(statuses):
            surprises.append("\n".join([told, *(ranks.said(rank)[-2000:] for rank in range(RANKS))]))
        elif fault.kind in DAMAGES:
            remove_home(home_of(folder / "run"))  # else no start reads the checkpoint
            damage_newest(folder / "run/checkpoints", fault.kind, rng)
    return Fight(list(faults[:struck]), start, failed_saves, from_memory, surprises)


def faults_of(fight, clean, fire):
    """Differences between the run under fire and the run without faults; empty if there are none."""
    problems = [f"surprise: {told}" for told in fight.surprises]
    state = read_status(fire / "run").state
    if state != "finished":
        return [*problems, f"the run under fire ended {state}, after {fight.starts} starts"]
    problems += [f"{what} differ" for what in differences(end_of(clean), end_of(fire))]
    if (clean / "run/weights.safetensors").read_bytes() != (fire / "run/weights.safetensors").read_bytes():
        problems.append("weights differ")
    damaged = sum(fault.kind in DAMAGES for fault in fight.struck)
    if (aside := len(set_aside(fire / "run/checkpoints"))) != damaged:
        problems.append(f"{damaged} checkpoints were damaged, {aside} set aside")
    return problems + [f"left over: {path}" for path in unfinished(fire / "run/checkpoints")]


def soak(folder, steps, every, seed):
    """Prints what happens. Returns what is wrong with the run under fire, and what grew in the one without faults."""
    rng = random.Random(seed)
    faults = draw_faults(rng, steps, every)
    print(f"seed {seed}: {RANKS} ranks, {steps} steps, {len(faults)} faults, in {folder}", flush=True)
    clean, fire = folder / "clean", folder / "fire"
    clean.mkdir()
    fire.mkdir()
    write_data(folder / "data")
    watch, start_s = Watch(clean), time.monotonic()
    ranks = FreshRanks(soak_config(clean, steps, every), RANKS, watch)
    statuses = ranks.join(DEADLINE_S)
    assert statuses == [0] * RANKS, f"without faults: {statuses}\n{ranks.said(0)}"
    clean_s = time.monotonic() - start_s
    fight = train_under_fire(soak_config(fire, steps, every), faults, rng)
    fire_s = time.monotonic() - start_s - clean_s

    print("\n| fault | times |\n|---|---|")
    times = Counter(fault.kind for fault in fight.struck)
    for kind in KINDS:
        print(f"| {kind} | {times[kind]} |")
    starts = f"{fight.starts} starts, {fight.from_memory} from memory"
    print(f"\n{starts}, {fight.failed_saves} failed saves, {len(fight.surprises)} other ends than told")
    print(f"{clean_s:.0f} s without faults, {fire_s:.0f} s with them; {len(end_of(clean)['metrics'])} rows logged")
    for rank in range(RANKS):
        used = zip(Usage._fields, *watch.ends(rank), strict=True)
        print(f"rank {rank} without faults: " + ", ".join(f"{what} {a:.5g} -> {b:.5g}" for what, a, b in used))
    missed = [f"did not strike: {fault}" for fault in faults[len(fight.struck) :]]
    return missed + faults_of(fight, clean, fire), growth(watch)


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=40, help="attempts from one fault to the next, on average")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6), help="of an earlier soak, to repeat it")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="megamix-soak-"))
    wrong, grew = soak(folder, given.steps, given.every, given.seed)
    if wrong or grew:
        print("\n".join(["FAILED", *wrong, *grew]))
        return 1  # the folder stays, to be looked at
    print("PASSED: the same logs, weights, moments and counters, bit for bit; nothing grew")
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
