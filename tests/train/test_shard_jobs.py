"""Whole jobs with `parallelism.shard` "gradients" and "parameters" end with the bits of "states": weights, every number
of metrics.jsonl, batches requeued, redone or set aside, validation and sample; packed documents, dropout, each
recompute, tied tables, several micro-batches and tensor-parallel ranks included. A run continues from any setting and
layout to any other, pipelines too. The log says how many bytes a rank holds.
"""

import random
import re
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megamix.builders.objects import build_engine
from megamix.mixed_precision.settings import Shard
from megamix.model.transformer import Transformer
from megamix.train import job
from tests.builders import run_on_ranks, tiny_job, write_data
from tests.conftest import FULL
from tests.distributed.pipelines import SCHEDULES
from tests.train.outcome import metrics_of
from tests.train.recorded import run_recorded

pytestmark = pytest.mark.uncounted

SHARDS = get_args(Shard)
BAD_ATTEMPTS, BAD_SAMPLE = frozenset((2, 5)), frozenset((9,))
AXES = {
    ("model", "recompute"): ["none", "selective", "full", {"full": 1}],
    ("model", "tie_embeddings"): [True, False],
    ("model", "dropout"): [0.0, 0.1],
    ("model", "position"): ["rotary", "learned"],
    ("data", "packing"): ["none", "documents"],
    ("precision", "dtype"): ["fp16", "bf16"],
    ("precision", "reduce_dtype"): ["half", "half_fp32_sum"],
    ("precision", "loss_scale"): [{}, {"rule": "headroom"}],  # headroom looks before the first step
    ("precision", "on_overflow"): ["requeue", "redo", "skip"],
    ("training", "global_batch_size"): [1, 2],  # times the ranks: one micro-batch or several
    ("parallelism", "overlap"): [True, False],
    ("parallelism", "accumulate"): ["local", "owner"],
    ("parallelism", "tp_size"): [1, 2],
}


def _cases(count):
    """Return `count` seeded picks, each axis through all of its values in turn."""
    rng, cases = random.Random(0), [{} for _ in range(count)]
    for (section, key), values in AXES.items():
        turns = [value for start in range(0, count, len(values)) for value in rng.sample(values, len(values))]
        for case, value in zip(cases, turns, strict=False):
            case.setdefault(section, {})[key] = value
    return cases


def _run_each(folder, data, cases):
    """Run each case with each setting. Return the attempts and samples of the runs."""
    done = []
    for number, case in enumerate(cases):
        given = {
            "model": {"vocab_size": 280},
            "data": {"train": f"{data}/train", "valid": f"{data}/valid", "tokenizer": f"{data}/tokenizer.json"},
            "training": {"steps": 5, "eval_interval": 3, "micro_batch_size": 1, "eval_batches": 1},
            "checkpoint": {"save_interval": 4, "replica_check_interval": 2},
            "metrics": {"log_interval": 1, "precision_interval": 2},
        }
        sections = {name: given.get(name, {}) | case.get(name, {}) for name in {**given, **case}}
        sections["training"]["global_batch_size"] *= dist.get_world_size()
        runs = []
        for shard in SHARDS:
            sections["parallelism"] = sections["parallelism"] | {"shard": shard}
            job = tiny_job(folder / f"{number}-{shard}", **sections)
            runs.append(run_recorded(job, BAD_ATTEMPTS, BAD_SAMPLE))
        done.append(runs)
    return done


def _end(folder):
    names = ("run/sample.txt", "run/set_aside.jsonl")
    return {"metrics": metrics_of(folder)} | {
        name: (folder / name).read_text() for name in names if (folder / name).exists()
    }


CASES = _cases(36 if FULL else 2)


@pytest.mark.parametrize(("ranks", "cases"), [(2, CASES[: -len(CASES) // 3]), (4, CASES[-len(CASES) // 3 :])])
def test_jobs_end_with_the_bits_of_the_kept_copy(run_ranks, tmp_path, ranks, cases):
    write_data(tmp_path / "data", tokenizer=True)
    done = run_ranks(_run_each, ranks, tmp_path, tmp_path / "data", cases, deadline_s=900.0)
    for number, case in enumerate(cases):
        kept, *others = (tmp_path / f"{number}-{shard}" for shard in SHARDS)
        for records in done:
            assert all(record == records[number][0] for record in records[number]), case
        assert "valid/loss" in str(_end(kept))
        for other in others:
            assert _end(other) == _end(kept), (case, other.name)
            one, reference = (load_file(folder / "run/weights.safetensors") for folder in (other, kept))
            assert one.keys() == reference.keys()
            assert [name for name in one if not torch.equal(one[name], reference[name])] == [], (case, other.name)


def _chain(folder, data, legs):
    """Run one job in legs of one update, each with another layout and setting."""
    for number, (layout, shard) in enumerate(legs, start=1):
        job = tiny_job(
            folder,
            num_layers=4,
            dropout=0.1,
            tokens=data,
            steps=number,
            eval_interval=0,
            micro_batch_size=1,
            eval_batches=1,
            decay_style="constant",
            warmup_steps=0,
            parallelism={**layout, "shard": shard},
            log_interval=1,
        )
        run_on_ranks(job)


PIPELINES = [{"pp_size": 2, "pp_schedule": schedule} for schedule in SCHEDULES]
LEGS = [
    ({}, "states"),
    (PIPELINES[-1], "gradients"),
    ({"tp_size": 2}, "parameters"),
    (PIPELINES[0], "gradients"),
    ({}, "parameters"),
    ({"tp_size": 2}, "gradients"),
    ({}, "states"),
    (PIPELINES[1], "gradients"),
    (PIPELINES[-2], "gradients"),
    ({}, "parameters"),
][: None if FULL else 5]


def test_a_run_goes_from_any_setting_and_layout_to_any_other(run_ranks, tmp_path):
    write_data(tmp_path / "data")
    kept = [(layout, "states") for layout, _ in LEGS]
    for name, legs in (("kept", kept), ("moved", LEGS)):
        run_ranks(_chain, 2, tmp_path / name, tmp_path / "data", legs, deadline_s=900.0)
    assert len(metrics_of(tmp_path / "kept")) >= len(LEGS)
    assert metrics_of(tmp_path / "moved") == metrics_of(tmp_path / "kept")
    one, other = (load_file(tmp_path / name / "run/weights.safetensors") for name in ("kept", "moved"))
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def _held(folder):
    """Return, with each setting, the MiB that the log says a rank holds, and the same by hand.

    By hand it is 2 bytes an element of half parameters and of gradients, if the setting keeps them, and a share of the
    12 of masters and states.
    """
    told = []
    for whole, shard in zip((4, 2, 0), SHARDS, strict=True):
        config = tiny_job(folder, hidden_size=128, shard=shard)
        model = Transformer(config.model)
        engine = build_engine(config, model, model.units, 1)
        said = job._describe(config, engine)
        assert said.endswith("accumulation 1" + f' | shard = "{shard}"' * (shard != "states"))
        (mib,) = re.findall(r"([\d.]+) MiB a rank", said)
        num_params = sum(param.numel() for param in model.parameters())
        told.append((float(mib), num_params * (whole + 12 / engine.topology.dp.size) / 2**20))
    return told


def test_the_log_says_what_a_rank_holds(run_ranks, tmp_path):
    for told in run_ranks(_held, 2, tmp_path):
        for said, derived in told:
            assert said == pytest.approx(derived, abs=0.06)  # 0.05 of rounding, and the padding
        assert len({said for said, _ in told}) == len(SHARDS)
