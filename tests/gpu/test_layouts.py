"""Random layouts and settings train on simulated GPUs the same bits as on Gloo's CPU ranks, an overflow included;
`megamix verify` passes there, also on ranks that share a GPU.
"""

import os
import random
import zlib
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from megamix.base.machine import CPU_HALVES
from megamix.cli.verbs import main
from megamix.model import layers, ops
from megamix.model.ops import Ops
from megamix.tools.ranks import RankPool
from megamix.tools.verify.core.layout import parse_layout
from megamix.tools.verify.core.observed_step import rank_device
from megamix.tools.verify.foreign import watch
from megamix.tools.verify.layouts.judge_steps import judge
from tests.conftest import FULL, also_wide
from tests.gpu.pools import processes_with_gpus
from tests.model.flash import stand_in
from tests.tools.verify.jobs import OVERFLOW_AT, UPDATES, make_config, observe_case
from tests.tools.verify.layouts.covering import whole_matrix
from tests.tools.verify.layouts.test_layouts import AXES, _allowed
from tests.tools.verify.test_command import CONFIG, SMALL

LAYOUTS = ("dp2", "dp4", "tp2", "pp2", "cp2", "dp2cp2", "dp2pp2")
SETTINGS = AXES | {"layout": LAYOUTS, "fp32_sum": (False, True), "overlap": (True, False), "clip_grad": (0.0, 0.05)}
SETTINGS |= {"shard": ("states", "gradients", "parameters"), "accumulate": ("local", "owner")}


def _may_be(run):
    piped = parse_layout(str(run["layout"])).size("pp") > 1
    if piped and (run["shard"] == "parameters" or run["accumulate"] == "owner"):
        return False
    return _allowed(run) and not (run["dtype"] == "fp32" and run["fp32_sum"])


def _runs(layout):
    """Seeded picks of one layout; a few each, if not all are asked for."""
    matrix = whole_matrix(SETTINGS | {"layout": (layout,)}, _may_be)
    return random.Random(layout).sample(matrix, 40 if FULL else 1)


def _config(run):
    method = "heads" if "cp" in str(run["layout"]) else "gather"  # a GPU's kernels gather, and have bits of their own
    config = make_config(cp_method=method, **{name: value for name, value in run.items() if name in AXES})
    changes = {
        "precision": {"reduce_dtype": "half_fp32_sum" if run["fp32_sum"] else None},
        "parallelism": {key: run[key] for key in ("overlap", "shard", "accumulate")},
        "optimizer": {"clip_grad": run["clip_grad"]},
    }
    return config.with_keys(**changes)


@contextmanager
def _one_arithmetic():
    """The model rounds elsewhere on a GPU. With this it does not, and what is left to differ is the engine's."""
    right = layers.linear_cross_entropy

    def in_fp32(hidden, weight, *others):
        return right(hidden.float(), weight.float(), *others)

    with (
        mock.patch.dict(os.environ, {CPU_HALVES: "native"}),
        mock.patch.object(Ops, "_sums_wide", lambda self, x: False),
        mock.patch.object(layers, "linear_cross_entropy", in_fp32),
        sdpa_kernel(SDPBackend.MATH),
    ):
        yield


@_one_arithmetic()
def _digests(configs):
    """Return of each run all that can be compared, by what it is of."""
    found = []
    for config in configs:
        found.append({})
        for number, step in enumerate(observe_case(config)):
            found[-1] |= {(number, name): value for name, value in step.scalars.items()}
            for part in (*step.owned, *step.copies):
                found[-1][number, part.state, part.spec.name, part.start] = zlib.crc32(part.values.numpy().tobytes())
    return found


@pytest.mark.parametrize("layout", also_wide(LAYOUTS, "dp2"))
def test_a_layout_trains_the_bits_of_gloo(run_ranks, gpu_ranks, layout):
    runs, size = _runs(layout), parse_layout(layout).world_size
    for first in range(0, len(runs), 2):  # of more runs, groups that they have made would fill the threads
        some = runs[first : first + 2]
        configs = [_config(run) for run in some]
        want, got = (ranks(_digests, size, configs, deadline_s=900.0) for ranks in (run_ranks, gpu_ranks))
        for rank, both in enumerate(zip(got, want, strict=True)):
            for run, one, other in zip(some, *both, strict=True):
                assert one == other, f"rank {rank} of {run}: {[key for key in other if one[key] != other[key]][:3]}"


@pytest.mark.parametrize("dtype", random.Random(0).sample(AXES["dtype"], 3 if FULL else 1))
def test_verify_passes(gpu_ranks, capsys, monkeypatch, dtype):
    monkeypatch.setenv(CPU_HALVES, "native")  # the judge is a CPU, and computes as the ranks' GPUs do
    known = [layout for layout in LAYOUTS if "cp" not in layout]  # its kernels are not in the processes of a command
    layouts = random.Random(dtype).sample(known, len(known) if FULL else 2)
    settings = [line for line in SMALL if dtype == "fp16" or not line.startswith("precision.loss_scale")]
    settings += [f"precision.dtype={dtype}", "model.num_layers=4", "--layouts", ",".join(layouts)]
    with processes_with_gpus(), mock.patch.multiple(torch.cuda, is_available=lambda: True, device_count=lambda: 8):
        assert main(["verify", CONFIG, *settings]) == 0
    assert capsys.readouterr().out.count("passes") == len(layouts)


def test_verify_passes_ranks_that_share_a_gpu(gpu_ranks, capsys, monkeypatch):
    monkeypatch.setenv(CPU_HALVES, "native")
    layouts = ("dp2", "dp2-parameters", "tp2sp") if FULL else ("dp2-parameters",)
    settings = [*SMALL, "--layouts", ",".join(layouts), "--device", "cuda", "--share-card"]
    with processes_with_gpus(), mock.patch.multiple(torch.cuda, is_available=lambda: True, device_count=lambda: 1):
        assert main(["verify", CONFIG, *settings]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:-1]]
    assert [(row[0], row[1], row[-1]) for row in rows] == [(layout, "cuda:0", "passes") for layout in layouts]


def _seen_by_a_trainer():
    """Return this rank's LOCAL_RANK, device and backend, as a script finds them."""
    with mock.patch.multiple(watch, loaded_trainer=mock.MagicMock(), _watch=lambda *_: os.environ["LOCAL_RANK"]):
        return watch.watch_trainer("", 1), str(rank_device()), dist.get_backend()


def test_a_trainer_takes_the_gpu_that_its_ranks_share(gpu_ranks):
    with processes_with_gpus(), RankPool(2, "cuda:0") as pool:
        assert pool.call(_seen_by_a_trainer) == [("0", "cuda:0", "gloo")] * 2


# Context parallelism as on a GPU, with a stand-in for the kernels.


def _observe_with_kernels(configs):
    ops._flash_takes_borders.cache_clear()
    with stand_in(), mock.patch.object(torch.backends.cuda, "is_flash_attention_available", lambda: True):
        return [observe_case(config) for config in configs]


def test_verify_passes_kernels_that_take_segments(gpu_ranks):
    model = {"hidden_size": 64, "seq_len": 32}
    configs = [
        make_config("cp2", dtype="fp16", model=model),
        make_config("cp2", dtype="bf16", packing="documents", shard="parameters", model=model | {"recompute": "full"}),
        make_config("cp2", dtype="fp16", packing="documents", model=model | {"window": {"sizes": [6, 0]}}),
    ]
    for config, *ranks in zip(configs, *gpu_ranks(_observe_with_kernels, 2, configs), strict=True):
        assert judge(config, ranks, torch.device("cpu"), UPDATES, OVERFLOW_AT).differences == []
