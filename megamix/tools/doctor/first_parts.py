"""The parts of `megamix doctor --first-light` that no other verb has, each a process: `python -m ... NAME`.

A part prints each finding at once, as a line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megamix.base.signals import PREEMPTED
from megamix.config import config_from_dict
from megamix.model.fp8 import FP8_CAPABILITY
from megamix.tools.bench.sides import SIZES, ByHand, Engine, Ours, Work, fitted, half_of
from megamix.tools.doctor.finding import Finding, expected, found, not_here
from megamix.tools.doctor.first_light import end_tree, start
from megamix.tools.doctor.ranks import make_step
from megamix.tools.ranks import RankFailure, RankPool, num_cards
from megamix.tools.verify.core.layout import parse_layout
from megamix.tools.verify.layouts.layout_lines import verify_layout

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
STEPS, FEW = 20, 6
_SWIGLU = {"activation": "swiglu", "norm": "rmsnorm", "rope": {}, "num_kv_heads": 2}
_FP16: dict[str, Any] = {"dtype": "fp16", "loss_scale": {"rule": "static", "init_scale": 1024.0}}
_EXPERTS = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 64, "shared_ffn_hidden_size": 64, "dense_layers": 1}
# Settings that one rank verifies, by name: keys on top of doctor's job.
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp16, gelu": {"precision": _FP16, "model": {"activation": "gelu", "compile": True}},
    "compiled": {"model": {**_SWIGLU, "compile": True, "recompute": "selective"}},
    "packed": {"model": {**_SWIGLU, "compile": True}, "data": {"packing": "documents"}},
    "windows": {"model": {**_SWIGLU, "window": {"sizes": [16, 0]}}},
    "rowwise": {"model": {**_SWIGLU, "compile": True}, "precision": {"fp8": {"recipe": "rowwise"}}},
    "tensorwise": {"model": _SWIGLU, "precision": {"fp8": {"recipe": "tensorwise", "weight_grad": "fp8"}}},
    "experts": {"model": {**_SWIGLU, "experts": _EXPERTS}},
    "experts, fp16": {"model": {"experts": _EXPERTS}, "precision": _FP16},
    "muon": {"optimizer": {"name": "muon"}},
    "parameters": {"model": {**_SWIGLU, "recompute": "selective"}, "parallelism": {"shard": "parameters"}},
}
# Layouts of two ranks that share one card.
SHARED = ("dp2", "dp2-gradients", "dp2-parameters", "tp2", "tp2sp", "cp2")


def precision() -> dict[str, Any]:
    """Return the section of a job: BF16, or FP16 on a card without it."""
    return {"dtype": "bf16"} if half_of(DEVICE) == torch.bfloat16 else _FP16


def _losses(side: Engine, work: Work, steps: int) -> list[float]:
    step = make_step(side, work)
    return [float(step()) for _ in range(steps)]


def trained(work: Work, **sharding: Any) -> str:
    """Take a few steps, and return a hash of the FP32 weights."""
    side = Ours(work, **sharding)
    _losses(side, work, FEW)
    weights = side.engine.full_weights().values()
    return hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in weights)).hexdigest()


def smoke() -> Iterator[Finding]:
    """Train beside a loop by hand, then on every card with NCCL, in three shards, on the same sequences."""
    work = replace(SIZES["3M"], device=DEVICE, compile_update=ON_GPU)
    halves = [torch.float16] if precision() is _FP16 else [torch.bfloat16, torch.float16]
    for dtype in halves:
        of_dtype = replace(work, dtype=dtype)
        ours, by_hand = (_losses(kind(of_dtype), work, STEPS) for kind in (Ours, ByHand))
        apart = max(abs(a - b) for a, b in zip(ours, by_hand, strict=True))
        wrong = not (apart < 0.02 and ours[-1] < ours[0] - 0.1)
        seen = f"loss {ours[0]:.3f} to {ours[-1]:.3f}, at most {apart:.2g} apart"
        yield found("smoke", seen, wrong, of=str(dtype).removeprefix("torch."))
    # The mean of 1, 2 or 4 equal halves is exact, in any order of sums.
    cards = 1 << (min(4, num_cards() or 1).bit_length() - 1)
    alone = trained(work)
    with RankPool(cards, DEVICE) as ranks:
        for shard in ("states", "gradients", "parameters"):
            bits = {*ranks.call(partial(trained, work, shard=shard))}
            seen = f"{'the' if bits == {alone} else 'other'} bits, {cards} rank(s)"
            yield found("shards", seen, bits != {alone}, of=shard)
    if cards == 1:
        yield not_here("more cards", "there is one card, or none")


def verify() -> Iterator[Finding]:
    """Verify settings on one rank, and layouts of two ranks that share a card."""
    chosen = SETTINGS if ON_GPU else {name: SETTINGS[name] for name in ("plain", "experts")}
    base = {**expected()["job"], "precision": precision()}
    pool = partial(RankPool, deadline_s=60.0)
    with pool(1, DEVICE) as alone, pool(2, "cuda:0" if ON_GPU else "cpu") as pair:
        cases = [(name, "dp1", alone, change) for name, change in chosen.items()]
        cases += [(name, name, pair, {"model": _SWIGLU}) for name in (SHARED if ON_GPU else SHARED[:2])]
        for name, layout, ranks, change in cases:
            if "fp8" in change.get("precision", {}) and ON_GPU and torch.cuda.get_device_capability() < FP8_CAPABILITY:
                yield not_here(f"verify {name}", "this card has no FP8")
                continue
            try:
                job = config_from_dict(base, {"optimizer": {"compile": ON_GPU}}, change)
                verdict = verify_layout(job, parse_layout(layout), ranks)
            except (RankFailure, ValueError) as error:
                yield found("verify", str(error).strip().splitlines()[-1], True, of=name)
                continue
            check, share = max(verdict.worst.items(), key=lambda one: one[1])
            yield found("verify", f"{share:.3f}, {check}", bool(verdict.differences), of=name)


def _job(name: str, changes: Mapping[str, Any]) -> list[str]:
    """Write a job, whose run has the same name, into the working folder; return Python's arguments for it."""
    own = {"data": {"train": [{"markov": 16, "weight": 1.0}]}, "checkpoint": {"folder": name}}
    config = config_from_dict(expected()["job"], own, changes)
    Path(f"{name}.toml").write_text(config.text)
    return ["-m", "megamix.cli.pretrain", f"{name}.toml"]


def _run(
    what: str, arguments: Sequence[str], right: int, until: str = "", number: int = 0
) -> tuple[Finding, list[str]]:
    """Run a job on one rank. Return whether it ended with the status `right`, and its lines.

    `until`: a pattern of the line at which the job is sent signal `number`; SIGKILL ends its ranks, too.
    """
    process, lines = start(arguments, Path(), sys.stderr, NPROC_PER_NODE="1"), [""]
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line.decode(errors="replace").rstrip())
        print(lines[-1], flush=True)
        if until and re.search(until, lines[-1]):
            end_tree(process.pid) if number == signal.SIGKILL else process.send_signal(number)
            until = ""
    status = process.wait()
    return found("job", f"status {status}, {lines[-1]}", status != right, of=what), lines


def job() -> Iterator[Finding]:
    """Run a job, and again with a SIGTERM in the middle: the weights are the same bits."""
    steps = 2000 if ON_GPU else 60
    changes: dict[str, Any] = {
        "training": {"steps": steps, "global_batch_size": 4, "deterministic": ON_GPU}, "precision": {"dtype": "fp16"},
        "metrics": {"log_interval": steps // 20, "tensorboard": False},
    }  # fmt: skip
    whole, cut = (_job(name, changes) for name in ("whole", "cut"))
    yield _run("whole", whole, 0)[0]
    yield _run("stopped by SIGTERM", cut, PREEMPTED, rf"step +{steps // 4}/", signal.SIGTERM)[0]
    yield _run("resumed", cut, 0)[0]
    one, other = (Path(folder, "weights.safetensors") for folder in ("whole", "cut"))
    same = one.exists() and other.exists() and one.read_bytes() == other.read_bytes()
    yield found("job", "the same bits" if same else "other bits, or no weights", not same, of="weights")


def plan() -> Iterator[Finding]:
    """Train the largest model for some steps: planned beside measured, and the kernels that a step's time goes to. The
    job ends there, for its checkpoint would be large.
    """
    work = SIZES["1.3B" if ON_GPU else "3M"]
    work = fitted(work, torch.cuda.get_device_properties(0).total_memory) if ON_GPU else work
    size = {"micro_batch_size": work.micro_batch_size, "global_batch_size": 2 * work.micro_batch_size, "steps": 100}
    changes: dict[str, Any] = {
        "model": work.model.model_dump(), "training": size, "precision": precision(),
        "optimizer": {"lr": 3e-4, "compile": ON_GPU}, "metrics": {"log_interval": 4, "tensorboard": False},
        "profiling": {"start_step": 18, "num_steps": 1},
    }  # fmt: skip
    ended, lines = _run("large", _job("large", changes), -signal.SIGKILL, "profile up to it", signal.SIGKILL)
    yield ended
    for line in lines:
        if line.startswith(("memory |", "time |")):
            yield Finding("planned", "", line, "", "slow" if "WARNING" in line else "ok")
    kernels = Counter[str]()
    for event in json.loads(Path("large/trace_rank0.json").read_text())["traceEvents"] if ended.verdict == "ok" else ():
        if event.get("cat") == ("kernel" if ON_GPU else "cpu_op"):
            kernels[event["name"][:80]] += event["dur"] / 1e3
    for name, ms in kernels.most_common(12):
        yield Finding("profile", "", f"{ms:.2f} of {kernels.total():.1f} ms: {name}", "", "ok")


if __name__ == "__main__":
    part = {"smoke": smoke, "verify": verify, "job": job, "plan": plan}[sys.argv[1]]
    for finding in part():
        print(json.dumps(asdict(finding)), flush=True)
