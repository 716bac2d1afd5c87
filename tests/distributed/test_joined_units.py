"""Small neighbouring units of `shard = "parameters"` share a bucket and a gather, and train the same bits as "states",
with members that are skipped, recomputed, called out of turn or twice, differently on each rank. Two such units have
memory at a time. A unit is freed when the pass reaches the next one or its last member's forward ends; the last unit
stays for the backward.
"""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from megamix.mixed_precision.census import _joined
from tests.builders import LENGTH, MODEL_VOCAB, WIDTH, Block, bf16_engine, make_batch

BLOCKS = 9  # 2,041 elements each, of 19,809: four units of two blocks, and one of one


class DeepModel(nn.Module):
    def __init__(self, recompute="none"):
        super().__init__()
        self.embedding = nn.Embedding(MODEL_VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, MODEL_VOCAB, bias=False)
        self.recompute = recompute

    def forward(self, tokens, order):
        """Call the blocks in this order. `recompute`: "none", "each" block by itself, or "threes" of them together."""
        x = self.embedding(tokens)
        if self.recompute == "none":
            return self.head(self._some(x, order))
        size = 3 if self.recompute == "threes" else 1
        for start in range(0, len(order), size):
            x = checkpoint(self._some, x, order[start : start + size], use_reentrant=False)
        return self.head(x)

    def _some(self, x, order):
        for number in order:
            x = self.blocks[number](x)
        return x


def _engine(shard="parameters", recompute="none", grad_accum_steps=1):
    torch.manual_seed(3)
    model = DeepModel(recompute)
    return bf16_engine(model, shard=shard, clip_grad=0.05, grad_accum_steps=grad_accum_steps)


def _loss(engine, step, rank, micro_batch, order):
    tokens = make_batch(step, rank, micro_batch)
    logits = engine(tokens[:, :-1], order)
    return F.cross_entropy(logits.float().view(-1, MODEL_VOCAB), tokens[:, 1:].reshape(-1))


@pytest.mark.parametrize(
    ("sizes", "whole", "numbers"),
    [
        ([10] * 9, 80, [1, 2, 3, 4, 5, 6, 7, 8, 9]),  # an eighth each
        ([10] * 5, 160, [1, 1, 2, 2, 3]),
        ([10, 30, 10, 10], 160, [1, 2, 3, 3]),  # a large one is not joined
        ([400_000] * 4, 10**8, [1, 1, 1, 2]),
        ([999_999, 1_000_000, 1], 10**9, [1, 2, 3]),
        ([5, 0, 5, 30], 160, [1, 1, 1, 2]),  # one has no parameters of its own
    ],
)
def test_units_are_joined_until_they_reach_the_least_size(sizes, whole, numbers):
    assert _joined(sizes, whole) == numbers


def test_joined_units_share_a_bucket():
    names = [{name.split(".")[1] for name in bucket.named_params if "blocks" in name} for bucket in _engine().buckets]
    assert [name for name in names if name] == [{"8"}, {"6", "7"}, {"4", "5"}, {"2", "3"}, {"0", "1"}]


ALL = tuple(range(BLOCKS))


@dataclass(frozen=True)
class Case:
    order: tuple[int, ...] = ALL
    of_others: tuple[int, ...] | None = None  # calls of ranks with odd numbers; None: the same
    recompute: str = "none"
    grad_accum_steps: int = 1
    takes_turns: bool = False  # in odd micro-batches ranks of odd numbers call `order`, the others `of_others`


CASES = {
    "all": Case(),
    "micro-batches": Case(grad_accum_steps=3),
    "last members skipped": Case((0, 2, 4, 6, 8)),
    "first members skipped": Case((1, 3, 5, 7)),
    "units skipped": Case((0, 1, 6, 8)),
    "others on other ranks": Case((0, 1, 2, 5, 7), (1, 4, 6, 7, 8)),
    "other ones in each micro-batch": Case((0, 1, 2, 5, 7), (1, 4, 6, 7, 8), grad_accum_steps=2, takes_turns=True),
    "the last one skipped": Case((0, 1, 2, 3)),
    "backwards": Case(ALL[::-1]),
    "twice in turn": Case((0, 0, 1, 1, 2, 3, 3, 8)),
    "all of them twice": Case((*ALL, *ALL)),
    "one between the others": Case((0, 2, 0, 3, 4, 0, 5, 6, 0, 7, 8)),
    "recompute each": Case(recompute="each"),
    "recompute threes": Case(recompute="threes"),
    "recompute threes, some skipped": Case((0, 2, 3, 4, 6, 8), (0, 1, 2, 3, 7), recompute="threes"),
    "recompute, twice": Case((0, 1, 2, 3, 2, 3, 4, 5, 1), recompute="threes", grad_accum_steps=2),
}


def _train(case, shard):
    """Return the weights and this rank's results over two steps, with an evaluation within each step."""
    rank = dist.get_rank()
    engine = _engine(shard, case.recompute, case.grad_accum_steps)
    told = []
    for step in range(2):
        for micro_batch in range(case.grad_accum_steps):
            is_other = (rank + micro_batch * case.takes_turns) % 2
            order = case.of_others if is_other and case.of_others is not None else case.order
            loss = _loss(engine, step, rank, micro_batch, order)
            with torch.no_grad():
                told.append(float(_loss(engine, step, 0, 0, ALL)))
            engine.backward(loss)
        told += [float(value) for value in engine.step()[:4]]
    return engine.full_weights(), told


def _compare(names):
    wrong = []
    for name in names:
        (kept, kept_told), (own, told) = (_train(CASES[name], shard) for shard in ("states", "parameters"))
        wrong += [f"{name}: {weight}" for weight, value in kept.items() if not torch.equal(own[weight], value)]
        wrong += [f"{name}: told {told} for {kept_told}"] if told != kept_told else []
    return wrong


@pytest.mark.parametrize("dp_size", [1, 2])
def test_ranks_train_the_bits_of_the_kept_copy(run_ranks, dp_size):
    assert run_ranks(_compare, dp_size, [*CASES], deadline_s=300.0) == [[]] * dp_size


def _live(engine):
    """Return the blocks whose half parameters have memory, unit by unit in registration order."""
    there = [bucket for bucket in reversed(engine.buckets) if bucket.params.untyped_storage().nbytes()]
    units = [sorted({name.split(".")[1] for name in bucket.named_params if "blocks" in name}) for bucket in there]
    return ["".join(blocks) for blocks in units if blocks]


def _watch(engine):
    """Note which blocks have memory when a block computes, and after it."""
    seen = []
    for number, block in enumerate(engine.module.blocks):
        # The note is taken inside the block, after the engine's own hooks; the note after it before the engine's own.
        block.norm.register_forward_pre_hook(lambda *_, number=number: seen.append((str(number), _live(engine))))
    return seen


def _live_in_backward(engine, loss, layer="norm"):
    """Return the blocks that have memory when the gradient of this layer of a block arrives."""
    live = []
    for block in engine.module.blocks:
        getattr(block, layer).weight.register_hook(lambda grad: live.append(_live(engine)))
    engine.backward(loss)
    return live


def test_two_have_memory_at_a_time_and_the_last_stays():
    engine = _engine()
    seen = _watch(engine)
    loss = _loss(engine, 0, 0, 0, ALL)
    in_turn = ["01", "23", "45", "67", "8"]
    assert seen == [(str(number), in_turn[number // 2 : number // 2 + 2]) for number in ALL]
    assert _live(engine) == ["8"]
    at_gradients = _live_in_backward(engine, loss, "down")
    assert [len(live) for live in at_gradients] == [2] * 7 + [1] * 2
    assert (at_gradients[0], at_gradients[-1]) == (["67", "8"], ["01"])
    assert _live(engine) == []
    engine.step()
    with torch.no_grad():
        _loss(engine, 0, 0, 0, ALL)
    assert _live(engine) == []


def test_a_unit_whose_last_member_is_skipped_goes_when_the_pass_reaches_the_next():
    engine = _engine()
    seen = _watch(engine)
    loss = _loss(engine, 0, 0, 0, (0, 2, 4, 6, 8))
    assert seen == [("0", ["01", "23"]), ("2", ["23", "45"]), ("4", ["45", "67"]), ("6", ["67", "8"]), ("8", ["8"])]
    assert max(map(len, _live_in_backward(engine, loss))) == 2  # its skipped members never have gradients
    assert _live(engine) == []


def test_what_a_step_skips_is_not_kept_for_what_the_step_before_has_called():
    engine = _engine()
    engine.backward(_loss(engine, 0, 0, 0, ALL))
    engine.step()
    assert max(map(len, _live_in_backward(engine, _loss(engine, 1, 0, 0, (0, 2, 4, 6, 8))))) == 2


def test_a_unit_goes_behind_its_backward_where_weights_of_it_get_no_gradient():
    engine = _engine()
    for block in engine.module.blocks:
        block.forward = lambda x, block=block: x + block.norm(x)
    assert max(map(len, _live_in_backward(engine, _loss(engine, 0, 0, 0, ALL)))) == 2


def test_a_member_keeps_its_unit_while_it_calls_one_of_another():
    told = {"states": [], "parameters": []}
    for shard, seen in told.items():
        engine = _engine(shard)
        first, fifth = engine.module.blocks[0], engine.module.blocks[4]
        # The first block's weights are read after another unit's forward.
        first.forward = lambda x, forward=first.forward, fifth=fifth: forward(fifth(x))
        for step in range(2):
            engine.backward(_loss(engine, step, 0, 0, (0, 1)))
            seen.append([float(value) for value in engine.step()[:4]])
    assert told["states"] == told["parameters"]


def test_members_called_outside_of_the_models_forward_leave_one_unit_behind():
    engine = _engine()
    x = torch.zeros(1, LENGTH, WIDTH, dtype=torch.bfloat16)
    with torch.no_grad():
        for number in (0, 2, 3, 4):
            x = engine.module.blocks[number](x)
            assert _live(engine) == {0: ["01"], 2: ["23"], 3: [], 4: ["45"]}[number]
    engine.backward(_loss(engine, 0, 0, 0, ALL))
    assert _live(engine) == []


def test_a_view_that_a_member_returns_is_refused_by_the_members_name():
    engine = _engine()
    engine.module.blocks[2].forward = lambda x: {"rows": engine.module.blocks[2].up.weight[:2]}
    with pytest.raises(RuntimeError, match=r"^blocks\.2 returns a parameter or a view of one"):
        _loss(engine, 0, 0, 0, ALL)
