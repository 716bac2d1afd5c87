"""Ranks that divide the positions of sequences train as one rank does: every layout, dtype and packing passes `verify`;
what is kept and sent is what is documented.
"""

import random
import re
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from unittest import mock

import pytest
import torch

from megamix.comm.collectives import Collectives, GlooCollectives, ShapesAlone
from megamix.comm.topology import Axis, Topology
from megamix.config import ConfigError, ParallelismConfig, config_from_dict
from megamix.data.deal import deal_chunks
from megamix.model import decoder
from megamix.model.context import find_documents
from megamix.model.ops import SEES_ALL, Ops
from megamix.model.span import Span
from megamix.model.transformer import Transformer
from megamix.parallel import context_parallel
from megamix.parallel.borders import Border
from megamix.parallel.build import build_model
from megamix.parallel.context_parallel import divide_positions
from megamix.parallel.tensor_parallel import divide_layers
from megamix.tools.plan.stand_ins import GpuShapes, with_kernels
from megamix.tools.verify.core.layout import parse_layout
from megamix.tools.verify.layouts.judge_steps import judge
from tests.builders import tiny_job, write_data
from tests.config.test_errors import changed
from tests.conftest import FULL
from tests.distributed.pipelines import SCHEDULES
from tests.model.flash import stand_in
from tests.tools.verify.catalogue.run import judged_layouts
from tests.tools.verify.jobs import OVERFLOW_AT, UPDATES, make_config, observe_case
from tests.train.outcome import metrics_of
from tests.train.recorded import run_recorded

LAYOUTS = {2: ["cp2"], 4: ["cp4", "dp2cp2", "tp2cp2", "tp2cp2sp", "cp2pp2", "replicas2cp2"]}
COUNTS = {2: 40, 4: 160} if FULL else {2: 2, 4: 6}

TWO = {"size": 2}


def _drawn(world_size):
    """Yield seeded jobs, every layout at least once."""
    dice = random.Random(world_size)
    layouts = LAYOUTS[world_size]
    for number in range(COUNTS[world_size]):
        layout = layouts[number % len(layouts)]
        stages = "pp" in layout
        family = dice.choice(["llama", "gpt"])
        method = dice.choice(["gather", "heads"])
        heads = {} if family == "gpt" else {"num_kv_heads": dice.choice([2, 4, 8] if method == "gather" else [4, 8])}
        yield make_config(
            layout.removesuffix("sp"), family=family, dtype=dice.choice(["fp32", "fp16", "bf16"]),
            tied=dice.random() < 0.5, accumulation=dice.choice([1, 2]),
            schedule=dice.choice(SCHEDULES) if stages else "1f1b", sequence_parallel=layout.endswith("sp"),
            packing=dice.choice(["none", "documents"]),
            shard=dice.choice(["states", "gradients"] + ["parameters"] * (not stages)),
            name=dice.choice(["adamw", "muon", "nag"]), cp_method=method,
            model={"seq_len": dice.choice([32, 64]), "recompute": dice.choice(["none", "selective", "full"]), **heads},
        )  # fmt: skip


@pytest.mark.parametrize("world_size", [2, 4])
def test_drawn_jobs_pass_verify(run_ranks, world_size):
    configs = [*_drawn(world_size)]
    for config, verdict in zip(configs, judged_layouts(run_ranks, world_size, configs), strict=True):
        assert verdict.differences == [], config
        assert 0 < verdict.worst["gradient"] < 1


def _grads_of_two(interleaved):
    """Return the gradients of two packed micro-batches with dropout and recompute. If `interleaved`, both forwards run
    before the backwards, as in a pipeline.
    """
    config = make_config("cp2", dtype="fp32", model={"seq_len": 32, "recompute": "full", "dropout": 0.2}).model
    model, _ = build_model(config, ParallelismConfig(context={"size": 2}), Topology.connect(cp=2), torch.device("cpu"))
    torch.manual_seed(0)
    model.load_state_dict(Transformer(config).state_dict(), assign=True)
    losses = []
    for length in (32, 5):
        tokens = torch.randint(72, (2, 33), generator=torch.Generator().manual_seed(length))
        positions = (torch.arange(32) % length).expand(2, -1)
        deal = torch.from_numpy(deal_chunks(positions.numpy(), 2))
        torch.manual_seed(length)
        losses.append(model(tokens[:, :-1], tokens[:, 1:], positions, 0, deal))
        if not interleaved:
            losses.pop().backward()
    for loss in losses:
        loss.backward()
    return [param.grad for param in model.parameters()]


def test_backward_recomputes_a_micro_batch_with_its_own_deal(run_ranks):
    for one, other in zip(run_ranks(_grads_of_two, 2, False), run_ranks(_grads_of_two, 2, True), strict=True):
        assert all(map(torch.equal, one, other))


def _positions(dice, num_positions):
    """Return positions of two sequences in packed documents, some of which continue."""
    rows = []
    for place in (0, 3):
        rows.append([])
        for _ in range(num_positions):
            place = 0 if dice.random() < 0.15 else place
            rows[-1].append(place)
            place += 1
    return torch.tensor(rows)


def test_every_pair_that_the_mask_lets_is_in_one_piece_of_one_rank_and_work_is_even():
    dice = random.Random(0)
    for num_ranks in (2, 3, 4):
        num_positions = 8 * num_ranks
        for packed, dealt in ((False, False), (True, False), (True, True)):
            positions = _positions(dice, num_positions) if packed else torch.arange(num_positions).expand(2, -1)
            deal = torch.from_numpy(deal_chunks(positions.numpy(), num_ranks)) if dealt else None
            count = torch.zeros(2, num_positions, num_positions, dtype=torch.int64)
            work = []
            for rank in range(num_ranks):
                part = Span(num_ranks, rank).begin(positions, deal)
                part.see(positions if packed else None, 0, torch.empty(2, 1), by_borders=False)
                before = int(count.sum())
                for piece in part.pieces:
                    for number in range(2)[piece.sequences]:
                        rows, columns = part.places[number][piece.rows], torch.arange(num_positions)[piece.columns]
                        seen = torch.ones(len(rows), len(columns), dtype=torch.bool)
                        count[number, rows[:, None], columns] += seen.tril() if piece.causal else seen
                work.append(int(count.sum()) - before)
            assert torch.equal(count, find_documents(positions, as_mask=True).mask[:, 0].long())
            assert packed or len({*work}) == 1


@contextmanager
def _as_on_gpus():
    with stand_in(), mock.patch.object(decoder, "takes_borders", lambda x, head_dim: True):
        yield


def _observe_as_on_gpus(configs):
    with _as_on_gpus():
        return [observe_case(config) for config in configs]


def test_kernels_that_take_borders_pass_verify(run_ranks):
    packed = {"hidden_size": 64, "seq_len": 16, "recompute": "full", "num_kv_heads": 2}
    configs = [
        make_config("cp2", dtype="fp16", model={"hidden_size": 64}),
        make_config("cp2", dtype="bf16", packing="documents", model=packed),
    ]
    for config, *ranks in zip(configs, *run_ranks(_observe_as_on_gpus, 2, configs), strict=True):
        assert judge(config, ranks, torch.device("cpu"), UPDATES, OVERFLOW_AT).differences == []


def _sent(recompute, as_on_gpus, method):
    """Return collectives along cp of a forward and backward of two layers, and those of the forward alone."""
    calls = Counter()

    def counted(name):
        right = getattr(GlooCollectives, name)

        def call(self, *given):
            calls[name] += 1
            return right(self, *given)

        return mock.patch.object(GlooCollectives, name, call)

    config = make_config("cp2", dtype="fp16", model={"hidden_size": 64, "recompute": recompute}).model
    model, _ = build_model(
        config, ParallelismConfig(context={"size": 2, "method": method}), Topology.connect(cp=2), torch.device("cpu")
    )
    for param in model.parameters():
        param.data = torch.randn(param.shape).half()
    tokens = torch.randint(72, (2, 9))
    with (
        counted("gather"), counted("sum_parts"), counted("table"), counted("exchange"),
        _as_on_gpus() if as_on_gpus else nullcontext(),
    ):  # fmt: skip
        loss = model(tokens[:, :-1], tokens[:, 1:])
        forward = dict(calls)
        (loss * 1024).backward()
    return [*sorted(forward.items()), *sorted(calls.items())]


@pytest.mark.parametrize(
    ("as_on_gpus", "method", "recompute", "want"),
    [
        (False, "gather", "none", [("gather", 2), ("gather", 4), ("sum_parts", 2)]),
        (True, "gather", "none", [("gather", 2), ("gather", 4), ("sum_parts", 2)]),
        (True, "gather", "full", [("gather", 2), ("gather", 6), ("sum_parts", 2)]),
        (False, "heads", "none", [("exchange", 4), ("exchange", 8)]),
        (False, "heads", "full", [("exchange", 4), ("exchange", 12)]),
    ],
)
def test_a_layer_sends_no_more_than_it_must(run_ranks, as_on_gpus, method, recompute, want):
    assert run_ranks(_sent, 2, recompute, as_on_gpus, method) == [want, want]


def _kept(cp_size, seq_len, packed, method="gather"):
    """Return the bytes that a forward keeps for backward, beside parameters."""
    config = make_config("dp1", dtype="bf16", model={"seq_len": seq_len, "hidden_size": 64, "num_layers": 4}).model
    section = ParallelismConfig(context={"size": cp_size, "method": method} if cp_size > 1 else None)
    model, _ = build_model(config, section, Topology.connect(cp=cp_size), torch.device("cpu"))
    kept = {}
    own = {param.untyped_storage().data_ptr() for param in model.parameters()}
    positions = (torch.arange(seq_len) % (seq_len // 4))[None] if packed else None

    def pack(x):
        if (at := x.untyped_storage().data_ptr()) not in own:
            kept[at] = x.untyped_storage().nbytes()
        return x

    tokens = torch.randint(72, (1, seq_len))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(tokens, tokens, positions)
    assert loss.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("seq_len", [2048, 8192] if FULL else [2048])
def test_a_rank_of_two_keeps_half_of_the_activations(run_ranks, seq_len, packed):
    whole = _kept(1, seq_len, packed)
    # Ranks that divide heads keep attention's output twice: with their heads, and with their positions.
    for method, most in (("gather", 0.55), ("heads", 0.56)):
        for kept in run_ranks(_kept, 2, 2, seq_len, packed, method):
            assert kept <= most * whole


@dataclass(frozen=True)
class _Own(Ops):
    """A user's operations, with a field of their own."""

    gain: float = 1.0

    def whole_linear(self, x, weight, bias):
        return super().whole_linear(x, weight, bias) * self.gain


def test_ways_to_divide_operations_compose_with_own_ones_in_any_order():
    config = make_config("dp1", family="gpt", dtype="fp32").model
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        model = Transformer(config, _Own(gain=2.0))
        ways = [
            lambda model: divide_positions(model, ShapesAlone(Axis((0, 1), 0))),
            lambda model: divide_layers(model, Border(ShapesAlone(Axis((0, 1), 0)), sequence=True)),
            _with_stand_ins,
        ]
        for way in order:
            ways[way](model)
        ops = model.blocks[0].feed_forward.down.ops
        assert isinstance(ops, _Own)
        assert isinstance(ops, GpuShapes)
        assert ops.gain == 2.0
        found = [ops.product, ops.attend, model.ops.keep, model.embedding.ops.look_up]
        assert [way.func.__name__ for way in found] == ["_by_rows", "_attend", "_keep_own", "_in_own_rows"]


def _with_stand_ins(model):
    for module in model.modules():
        if isinstance(ops := getattr(module, "ops", None), Ops):
            module.ops = with_kernels(ops, GpuShapes)


# Jobs.


def _job(folder, sizes, steps):
    return tiny_job(
        folder, parallelism=sizes, steps=steps, save_interval=2,
        decay_style="constant", dropout=0.1,
        log_interval=1, precision_interval=2,
    )  # fmt: skip


def test_a_job_resumes_on_every_layout_with_its_samples_and_metrics(run_ranks, tmp_path):
    meshes = [
        (2, {"dp_size": 2}), (4, {"context": {"size": 4}}), (2, {"tensor": TWO}), (4, {"replicas": 2, "context": TWO}),
        (4, {"context": TWO, "pipeline": TWO}),
    ]  # fmt: skip
    write_data(tmp_path / "data", tokenizer=True)
    samples, last = [], 2 * len(meshes)
    for number, (world_size, sizes) in enumerate(meshes, start=1):
        samples += run_ranks(run_recorded, world_size, _job(tmp_path, sizes, 2 * number))[0].samples()
    whole = tmp_path / "whole"
    write_data(whole / "data")
    assert samples == run_recorded(_job(whole, {}, last)).samples()
    found, alone = (metrics_of(folder) for folder in (tmp_path, whole))
    for one, other in zip(*([row for row in rows if "train/loss" in row] for rows in (found, alone)), strict=True):
        assert one["step"] == other["step"]
        assert one["train/loss"] == pytest.approx(other["train/loss"], rel=2e-3)  # the same masks; FP16 rounds by 5e-4
        assert one["train/tokens"] == other["train/tokens"] if "train/tokens" in one else True


def test_what_does_not_go_together_is_refused():
    for model, section, said in (
        ({"seq_len": 36}, {"context": {"size": 8}}, "needs a model.seq_len that is a multiple of 16, not 36"),
        ({"seq_len": 36, "num_heads": 4}, {"context": {"size": 8, "method": "heads"}}, "multiple of 8, not 36"),
        (
            {"seq_len": 32, "num_heads": 4},
            {"context": {"size": 4, "method": "heads"}, "tensor": {"size": 2}},
            'context.method: got "heads", but context.size * tensor.size = 8 must divide the 4 heads of',
        ),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            config_from_dict(changed(model=model, parallelism=section))
    span = Span(2, 1)
    with pytest.raises(ValueError, match=r"targets has 6 positions, which 2 context-parallel ranks .* a multiple of 4"):
        span.begin(torch.zeros(1, 6))
    assert span.begin(None) is None
    with pytest.raises(ValueError, match="on a meta device needs FP16 or BF16"):
        Span(2, 0).begin(torch.zeros(1, 8)).see(None, 0, torch.empty(1, 1, device="meta"), by_borders=False)
    exchanged = partial(context_parallel._with_exchanged_heads, Collectives(Axis((0, 1), 0)), None)
    query = torch.zeros(1, 6, 4, 8)
    part = Span(2, 0, by_heads=True).begin(torch.zeros(1, 8))
    with pytest.raises(ValueError, match=r"2 context-parallel ranks must divide the 3 heads of .* \"gather\""):
        exchanged(Ops(), query, query[:, :3], query[:, :3], part, SEES_ALL)
    config = parse_layout("cp2").apply(make_config("dp1", family="gpt")).model
    with mock.patch.object(Transformer, "head_dim", lambda model: 0), pytest.raises(ValueError, match="its head_dim"):
        divide_positions(Transformer(config), Collectives(Axis((0, 1), 0)))
