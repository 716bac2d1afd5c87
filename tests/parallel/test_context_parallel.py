"""Ranks that divide the positions of sequences train as one rank does: every layout, dtype and packing passes `verify`,
dropout drops the same units, planted bugs are found at the first step; what is kept and sent is what is documented.
"""

import random
import re
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from unittest import mock

import pytest
import torch

from megamix.comm.collectives import Collectives, GlooCollectives, ShapesAlone
from megamix.comm.topology import Axis, Topology
from megamix.config import ConfigError, ParallelismConfig, config_from_dict
from megamix.data.deal import deal_chunks
from megamix.mixed_precision.step import StepProgress
from megamix.model import decoder
from megamix.model.context import find_documents
from megamix.model.ops import SEES_ALL, Ops
from megamix.model.span import Chunks, Span
from megamix.model.transformer import Transformer
from megamix.parallel import context_parallel
from megamix.parallel.borders import Border
from megamix.parallel.build import build_model
from megamix.parallel.context_parallel import divide_positions
from megamix.parallel.tensor_parallel import divide_layers
from megamix.tools.plan.stand_ins import GpuShapes, with_kernels
from megamix.tools.verify.core.layout import parse_layout
from megamix.tools.verify.layouts.judge_steps import judge
from megamix.tools.verify.layouts.observe import observe
from tests.builders import tiny_job, write_data
from tests.config.test_errors import changed
from tests.conftest import FULL
from tests.distributed.pipelines import SCHEDULES
from tests.model.flash import stand_in
from tests.parallel.layouts import Case, first_difference, same_everywhere, train
from tests.tools.verify.jobs import make_config
from tests.train.outcome import metrics_of
from tests.train.recorded import run_recorded

LAYOUTS = {2: ["cp2"], 4: ["cp4", "dp2cp2", "tp2cp2", "tp2cp2sp", "cp2pp2", "replicas2cp2"]}
COUNTS = {2: 40, 4: 160} if FULL else {2: 2, 4: 6}
AT_ONCE = 20  # observed steps of more would fill the memory


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
            model={"seq_len": dice.choice([32, 96]), "recompute": dice.choice(["none", "selective", "full"]), **heads},
        )  # fmt: skip


def _observe_all(configs):
    return [observe(config, 2, 1) for config in configs]


@pytest.mark.uncounted
@pytest.mark.parametrize("world_size", [2, 4])
def test_drawn_jobs_pass_verify(run_ranks, world_size):
    configs, worst = [*_drawn(world_size)], Counter()
    for some in (configs[first : first + AT_ONCE] for first in range(0, len(configs), AT_ONCE)):
        by_rank = run_ranks(_observe_all, world_size, some, deadline_s=900.0)
        for config, *ranks in zip(some, *by_rank, strict=True):
            verdict = judge(config, ranks, torch.device("cpu"), 2, 1)
            assert verdict.differences == [], config
            worst |= Counter(verdict.worst)
    assert 0 < worst["gradient"] < 1
    print({name: f"{worst[name]:.3f}" for name in ("gradient", "loss", "loss path", "norm")})


@pytest.mark.parametrize(
    "case",
    [
        Case(cp_size=2, dropout=0.1),
        Case(cp_size=2, tp_size=2, dropout=0.1, model="llama", recompute="full"),
        Case(cp_size=2, tp_size=2, dropout=0.1, sequence_parallel=False, dtype=torch.bfloat16),
        Case(dp_size=2, cp_size=2, model="llama", dtype=torch.float16, grad_accum_steps=2),
    ],
    ids=str,
)
def test_dropout_drops_the_units_of_one_process(run_ranks, case):
    outcomes = run_ranks(train, case.world_size, case)
    assert same_everywhere(outcomes)
    assert first_difference(case, outcomes, train(case.alone)) is None
    assert _numbers(outcomes) == _numbers(run_ranks(train, case.world_size, case))  # in every bit


def _numbers(outcomes):
    owned = [[one.values.tolist() for some in outcome.owned.values() for one in some] for outcome in outcomes]
    return [(outcome.losses, outcome.grad_norms, *each) for outcome, each in zip(outcomes, owned, strict=True)]


# Planted bugs. Each is a patch on every rank.


def _loss_times_cp():
    whole = StepProgress.scaled

    def scaled(self, loss, weight, *, counts):
        return whole(self, loss, weight, counts=counts) * self._num_parts

    return mock.patch.object(StepProgress, "scaled", scaled)


def _weight_counted_by_each():
    whole = StepProgress.scaled

    def scaled(self, loss, weight, *, counts):
        return whole(self, loss, weight * self._num_parts, counts=counts)

    return mock.patch.object(StepProgress, "scaled", scaled)


@contextmanager
def _positions_of_the_part():
    begin = Span.begin

    def counted(span, *given):
        part = begin(span, *given)
        if part is not None:
            own = part.places
            part.places = torch.arange(own.shape[1]).expand(len(own), -1)
            part.own = lambda x: x[torch.arange(len(x))[:, None], own]
        return part

    with mock.patch.object(Span, "begin", counted):
        yield


@contextmanager
def _without_the_last_chunk():
    """Rank 1 computes its first chunk twice."""
    own = Chunks.own

    def twice(part, x):
        first = own(part, x)[:, : part.chunk]
        return own(part, x) if part._rank == 0 else torch.cat((first, first), 1)

    with mock.patch.object(Chunks, "own", twice):
        yield


def _target_shift_at_the_border():
    """The last target of a chunk is the first one of the rank's other chunk."""
    forward = decoder.Decoder.forward

    def shifted(model, tokens, targets=None, *rest, **more):
        if targets is not None and model.span is not None:
            part = model.span.begin(targets)
            targets, firsts = targets.clone(), part._firsts[0].tolist()
            for first, following in zip(firsts, reversed(firsts), strict=True):
                targets[:, first + part.chunk - 1] = targets[:, following]
        return forward(model, tokens, targets, *rest, **more)

    return mock.patch.object(decoder.Decoder, "forward", shifted)


def _documents_leak():
    """Documents that begin in a chunk see the keys before the chunk."""
    pieces = Chunks._pieces_of
    return mock.patch.object(Chunks, "_pieces_of", lambda part, rows, firsts, begins: pieces(part, rows, firsts, [0]))


def _grads_of_own_keys_alone():
    def own(whole, part, cp):
        return part.by_rank(whole)[cp.axis.rank]

    return mock.patch.object(context_parallel, "_sum_own", own)


def _chunks_in_rank_order():
    def whole(part, parts):
        return torch.cat(parts.unbind(), 2)

    return mock.patch.object(Chunks, "whole", whole)


def _another_deal_on_a_rank():
    """Rank 1 takes the deal of the sequence beside."""
    begin = Span.begin

    def begun(span, targets, deal=None):
        return begin(span, targets, deal.roll(1, 0) if span.rank and deal is not None else deal)

    return mock.patch.object(Span, "begin", begun)


def _heads_of_another_rank():
    """What arrives is taken in reverse rank order."""
    exchanged = context_parallel._exchanged
    return mock.patch.object(context_parallel, "_exchanged", lambda parts, cp: exchanged(parts, cp).flip(0))


BUGS = {
    "loss x cp": (_loss_times_cp, "none", "gradient"),
    "weight counted cp times": (_weight_counted_by_each, "none", "loss"),
    "positions of the part": (_positions_of_the_part, "none", "gradient"),
    "gradients of keys not summed": (_grads_of_own_keys_alone, "none", "gradient"),
    "documents leak": (_documents_leak, "documents", "gradient"),
    "chunk order": (_chunks_in_rank_order, "none", "gradient"),
    "target shift at a chunk's border": (_target_shift_at_the_border, "none", "gradient"),
    "a rank's last chunk missing": (_without_the_last_chunk, "none", "gradient"),
    "another deal on a rank": (_another_deal_on_a_rank, "documents", "gradient"),
    "heads of another rank": (_heads_of_another_rank, "none", "gradient"),
}


def _observe_bugs(config_of):
    found = []
    for bug, config in config_of.items():
        with BUGS[bug][0]():
            found.append(observe(config, 1, None))
    return found


def test_planted_bugs_are_found_at_the_first_step(run_ranks):
    configs = {
        bug: make_config(
            "cp2",
            loss_scale=4.0,
            packing=packing,
            model={"seq_len": 16},
            cp_method="heads" if bug.startswith("heads") else "gather",
        )
        for bug, (_, packing, _) in BUGS.items()
    }
    for bug, *ranks in zip(configs, *run_ranks(_observe_bugs, 2, configs), strict=True):
        found = judge(configs[bug], ranks, torch.device("cpu"), 1, None).differences
        assert found, bug
        assert (found[0].attempt, found[0].check) == (0, BUGS[bug][2]), (bug, found[0])


def _train_with_own_masks(case):
    own = context_parallel._OwnPositions
    with mock.patch.object(own, "__call__", lambda mask, ops, x, share: mask._keep(ops, x, share)):
        return train(case)


@pytest.mark.uncounted
def test_equal_dropout_masks_are_found(run_ranks):
    case = Case(cp_size=2, dropout=0.1)
    assert first_difference(case, run_ranks(_train_with_own_masks, 2, case), train(case.alone)) is not None


def _grads_of_two(interleaved):
    """Return the gradients of two packed micro-batches with dropout and recompute. If `interleaved`, both forwards run
    before the backwards, as in a pipeline.
    """
    config = make_config("cp2", dtype="fp32", model={"seq_len": 32, "recompute": "full", "dropout": 0.2}).model
    model, _ = build_model(config, ParallelismConfig(cp_size=2), Topology.connect(cp=2), torch.device("cpu"))
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


@pytest.mark.uncounted
def test_backward_recomputes_a_micro_batch_with_its_own_deal(run_ranks):
    for one, other in zip(run_ranks(_grads_of_two, 2, False), run_ranks(_grads_of_two, 2, True), strict=True):
        assert all(map(torch.equal, one, other))


# The share of the work, of the memory and of the traffic that a rank has.


def _positions(dice, batch, num_positions):
    rows = []
    for _ in range(batch):
        row, place = [], dice.choice([0, 3])
        for _ in range(num_positions):
            place = 0 if dice.random() < dice.choice([0.02, 0.3]) else place
            row.append(place)
            place += 1
        rows.append(row)
    return torch.tensor(rows)


def _part(num_ranks, rank, positions, *, dealt):
    deal = torch.from_numpy(deal_chunks(positions.numpy(), num_ranks)) if dealt else None
    part = Span(num_ranks, rank).begin(positions, deal)
    assert part is not None
    return part


def _mask(positions):
    documents = find_documents(positions, as_mask=True)
    assert documents is not None
    assert documents.mask is not None
    return documents.mask[:, 0]


def test_every_pair_that_the_mask_lets_is_in_one_piece_of_one_rank_and_work_is_even():
    dice = random.Random(0)
    for num_ranks in (2, 3, 4):
        num_positions = 8 * num_ranks
        for packed, dealt in ((False, False), (True, False), (True, True)):
            positions = _positions(dice, 2, num_positions) if packed else torch.arange(num_positions).expand(2, -1)
            count = torch.zeros(2, num_positions, num_positions, dtype=torch.int64)
            work = []
            for rank in range(num_ranks):
                part = _part(num_ranks, rank, positions, dealt=dealt)
                part.see(positions if packed else None, 0, torch.empty(2, 1), by_borders=False)
                before = int(count.sum())
                for piece in part.pieces:
                    for number in range(2)[piece.sequences]:
                        rows, columns = part.places[number][piece.rows], torch.arange(num_positions)[piece.columns]
                        seen = torch.ones(len(rows), len(columns), dtype=torch.bool)
                        count[number, rows[:, None], columns] += seen.tril() if piece.causal else seen
                work.append(int(count.sum()) - before)
            assert torch.equal(count, _mask(positions).long())
            assert packed or len({*work}) == 1


def test_borders_of_a_chunk_are_the_mask_and_hold_every_key():
    dice = random.Random(1)
    for num_ranks in (1, 2, 3):
        for number in range(10):
            batch, num_positions = dice.choice([1, 3]), 8 * num_ranks
            positions = _positions(dice, batch, num_positions)
            for rank in range(num_ranks):
                part = _part(num_ranks, rank, positions, dealt=number % 2 > 0)
                part.see(positions, 0, torch.empty(batch, 1), by_borders=True)
                for rows, borders in zip(part.places.split(part.chunk, 1), part.segments, strict=True):
                    want = _mask(positions)[torch.arange(batch)[:, None], rows]
                    found = torch.zeros(want.shape[0] * want.shape[1], batch * num_positions)
                    ends = [borders.queries.tolist(), borders.keys.tolist()]
                    assert all(one == sorted(one) for one in ends)
                    assert [one[-1] for one in ends] == [len(found), batch * num_positions]
                    assert [one[0] for one in ends] == [0, 0]
                    for q, q_end, k, k_end in zip(ends[0], ends[0][1:], ends[1], ends[1][1:], strict=False):
                        seen = torch.ones(q_end - q, k_end - k).tril(k_end - k - (q_end - q))
                        found[q:q_end, k:k_end] += seen
                    blocks = found.view(batch, -1, batch, num_positions)
                    assert torch.equal(blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1).bool(), want)
                    assert int(found.sum()) == int(want.sum())


@contextmanager
def _as_on_gpus():
    with stand_in(), mock.patch.object(decoder, "takes_borders", lambda x, head_dim: True):
        yield


def _observe_as_on_gpus(configs):
    with _as_on_gpus():
        return _observe_all(configs)


@pytest.mark.uncounted
def test_kernels_that_take_borders_pass_verify(run_ranks):
    kinds = [
        {"dtype": "fp16", "model": {"hidden_size": 64}},
        {
            "dtype": "bf16",
            "packing": "documents",
            "model": {"hidden_size": 64, "seq_len": 16, "recompute": "full", "num_kv_heads": 2},
        },
    ]
    configs = [make_config("cp2", **kind) for kind in kinds]
    for config, *ranks in zip(configs, *run_ranks(_observe_as_on_gpus, 2, configs), strict=True):
        verdict = judge(config, ranks, torch.device("cpu"), 2, 1)
        assert verdict.differences == []


def _sent(recompute, as_on_gpus, method):
    """Return collectives along cp of a forward and backward of two layers, and those of the forward alone."""
    calls = Counter()
    whole = {name: getattr(GlooCollectives, name) for name in ("gather", "sum_parts", "table", "exchange")}

    def counted(name):
        def call(self, *given):
            calls[name] += 1
            return whole[name](self, *given)

        return mock.patch.object(GlooCollectives, name, call)

    config = make_config("cp2", dtype="fp16", model={"hidden_size": 64, "recompute": recompute}).model
    model, _ = build_model(
        config, ParallelismConfig(cp_size=2, cp_method=method), Topology.connect(cp=2), torch.device("cpu")
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


@pytest.mark.parametrize("as_on_gpus", [False, True])
def test_a_layer_gathers_once_forward_and_backward_and_sums_once(run_ranks, as_on_gpus):
    for recompute, gathers in (("none", 4), ("full", 6)):
        for sent in run_ranks(_sent, 2, recompute, as_on_gpus, "gather"):
            assert sent == [("gather", 2), ("gather", gathers), ("sum_parts", 2)]


def test_a_layer_that_divides_heads_exchanges_twice_forward_and_twice_backward(run_ranks):
    for recompute, exchanges in (("none", 8), ("full", 12)):
        for sent in run_ranks(_sent, 2, recompute, False, "heads"):
            assert sent == [("exchange", 4), ("exchange", exchanges)]


def _differing_blocks(packed):
    """Return the blocks whose outputs differ in a bit from those of one process, at this rank's positions."""
    config = make_config("dp1", dtype="fp32", model={"seq_len": 32, "num_kv_heads": 4}).model
    section, topology = ParallelismConfig(cp_size=2, cp_method="heads"), Topology.connect(cp=2)
    divided, _ = build_model(config, section, topology, torch.device("cpu"))
    torch.manual_seed(0)
    alone = Transformer(config)
    divided.load_state_dict(alone.state_dict(), assign=True)
    tokens = torch.randint(72, (2, 33), generator=torch.Generator().manual_seed(0))
    positions = (torch.arange(32) % 11).expand(2, -1) if packed else None
    seen = []
    for model in (alone, divided):
        outs = []
        for block in model.blocks:
            block.register_forward_hook(lambda *given, outs=outs: outs.append(given[2]))
        model(tokens[:, :-1], tokens[:, 1:], positions)
        seen.append(outs)
    own = slice(16 * topology.cp.rank, 16 * (topology.cp.rank + 1))
    return [layer for layer, (one, part) in enumerate(zip(*seen, strict=True)) if not torch.equal(one[:, own], part)]


@pytest.mark.parametrize("packed", [False, True])
def test_heads_have_the_bits_of_one_process_in_forward(run_ranks, packed):
    assert run_ranks(_differing_blocks, 2, packed) == [[], []]


def _kept(cp_size, seq_len, packed, method="gather"):
    """Return the bytes that a forward keeps for backward, beside parameters."""
    config = make_config("dp1", dtype="bf16", model={"seq_len": seq_len, "hidden_size": 64, "num_layers": 4}).model
    section = ParallelismConfig(cp_size=cp_size, cp_method=method)
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


@pytest.mark.uncounted
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("seq_len", [2048, 8192] if FULL else [2048])
def test_a_rank_of_two_keeps_half_of_the_activations(run_ranks, seq_len, packed):
    whole = _kept(1, seq_len, packed)
    # Ranks that divide heads keep attention's output twice: with their heads, and with their positions.
    for method, most in (("gather", 0.55), ("heads", 0.56)):
        for kept in run_ranks(_kept, 2, 2, seq_len, packed, method):
            print(f"{method}, {seq_len} positions: {kept / whole:.3f} of one rank's")
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
        kinds = [type(getattr(ops, name)).__name__ for name in ("product", "attend")]
        kinds += [type(model.ops.keep).__name__, type(model.embedding.ops.look_up).__name__]
        assert kinds == ["_Rows", "_GatheredAttention", "_OwnPositions", "_Table"]


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


@pytest.mark.uncounted
def test_a_job_resumes_on_every_layout_with_its_samples_and_metrics(run_ranks, tmp_path):
    meshes = [
        (2, {"dp_size": 2}), (2, {"cp_size": 2}), (4, {"cp_size": 4}), (2, {"tp_size": 2}),
        (2, {"replicas": 2}), (4, {"replicas": 2, "cp_size": 2}), (4, {"cp_size": 2, "pp_size": 2}),
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
        ({"seq_len": 36}, {"cp_size": 8}, "cp_size: got 8, needs a model.seq_len that is a multiple of 16, not 36"),
        ({"seq_len": 32}, {"cp_size": 4, "tp_size": 16}, "multiple of 64, not 32"),
        ({"seq_len": 36, "num_heads": 4}, {"cp_size": 8, "cp_method": "heads"}, "multiple of 8, not 36"),
        (
            {"seq_len": 32, "num_heads": 4},
            {"cp_size": 4, "tp_size": 2, "cp_method": "heads"},
            'cp_method: got "heads", but cp_size * tp_size = 8 must divide the 4 heads of keys and values',
        ),
        ({}, {"cp_size": 0}, "parallelism.cp_size: got 0, must be greater than 0"),
        ({}, {"cp_size": 2, "cp_method": "ulysses"}, "got \"ulysses\", must be 'gather' or 'heads'"),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            config_from_dict(changed(model=model, parallelism=section))
    span = Span(2, 1)
    with pytest.raises(ValueError, match=r"targets has 6 positions, which 2 context-parallel ranks .* a multiple of 4"):
        span.begin(torch.zeros(1, 6))
    assert span.begin(None) is None
    with pytest.raises(ValueError, match="on a meta device needs FP16 or BF16"):
        _part(2, 0, torch.zeros(1, 8), dealt=False).see(None, 0, torch.empty(1, 1, device="meta"), by_borders=False)
    exchanged = context_parallel._ExchangedHeads(Collectives(Axis((0, 1), 0)), lambda ops, *given: given[0])
    query = torch.zeros(1, 6, 4, 8)
    part = Span(2, 0, by_heads=True).begin(torch.zeros(1, 8))
    with pytest.raises(ValueError, match=r"2 context-parallel ranks must divide the 3 heads of .* \"gather\""):
        exchanged(Ops(), query, query[:, :3], query[:, :3], part, SEES_ALL)
    config = parse_layout("cp2").apply(make_config("dp1", family="gpt")).model
    with mock.patch.object(Transformer, "head_dim", lambda model: 0), pytest.raises(ValueError, match="its head_dim"):
        divide_positions(Transformer(config), Collectives(Axis((0, 1), 0)))
