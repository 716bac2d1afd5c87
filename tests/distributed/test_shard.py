"""Freeing gradients and half parameters changes no bit: with `Sharding(shard="gradients")` and `"parameters"` masters,
states, half parameters, losses, norms and flags are those of "states", on any ranks, over overflows, evaluations,
skipped and frozen parts, and recompute. A rank may look at its state alone between forward and backward. The turn from
forward to backward gathers nothing again.
"""

import copy
import io
import pickle
import random
import traceback
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megamix import AdamW, DynamicLossScale, Precision, ShardedEngine, Sharding
from megamix.comm.topology import Topology
from megamix.mixed_precision.observer import StepObserver
from megamix.mixed_precision.update_slice import MASTER
from tests.builders import bf16_engine, compiled_model, loss_of, make_batch, make_engine, make_model, train_step
from tests.conftest import FULL
from tests.distributed import test_equals_reference as plain
from tests.distributed.test_equals_reference import OPTIMIZERS, check_cases

pytestmark = pytest.mark.uncounted

SHARDS = ("gradients", "parameters")
COUNTS = {1: 30, 2: 60, 3: 30, 4: 50, 8: 30} if FULL else {1: 4, 2: 5, 3: 2, 4: 3, 8: 1}


@dataclass(frozen=True)
class Case(plain.Case):
    shard: str = "parameters"
    tied: bool = False
    tables: bool = False  # embedding and head are units, too
    frozen: bool = False
    evaluates: bool = False  # an evaluation between two micro-batches and between two steps
    flavour: str = "all"  # blocks that a batch runs: "all"; "skips", which differ by rank; "backwards"
    init_scale: float = 2.0**24  # some steps overflow
    steps: int = 9

    def flavour_at(self, step, rank):
        return {"all": 0, "skips": (step + rank) % 2, "backwards": 2}[self.flavour]


AXES = {
    "dtypes": [(torch.float16, torch.float16), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32),
               (torch.float16, torch.float16, "half_fp32_sum"), (torch.bfloat16, torch.bfloat16, "half_fp32_sum"),
               (torch.float16, torch.float32), (torch.bfloat16, torch.float32, "fp32")],
    "shard": SHARDS,
    "optimizer": [*OPTIMIZERS],
    "bucket_size": [None, 1111],
    "overlap": [True, False],
    "grad_accum_steps": [1, 3],
    "clip_grad": [0.0, 0.05],
    "tied": [False, True],
    "tables": [False, True],
    "recompute": [False, True],
    "frozen": [False, True],
    "evaluates": [False, True],
    "flavour": ["all", "skips", "backwards"],
}  # fmt: skip


def _cases(seed, count):
    """Return `count` seeded picks from the product of all axes, first those that show a value that no earlier one has
    shown.
    """
    rng, seen, covering, others = random.Random(seed), set(), [], []
    for _ in range(50 * count):
        settings = {axis: rng.choice(values) for axis, values in AXES.items()}
        new = {*settings.items()} - seen
        seen |= new
        (covering if new else others).append(settings)
    picked = [*covering, *others][:count]
    return [Case(*one["dtypes"], **{axis: one[axis] for axis in AXES if axis != "dtypes"}) for one in picked]


@dataclass
class Seen:
    """One rank's record of a run: (name, state, start, values) of the elements it owns, half parameters by name, and
    the results of each step and evaluation.
    """

    owned: list[tuple[str, str, int, Tensor]]
    half: dict[str, Tensor]
    told: list[float]


def _model(case):
    model = make_model(case.tied, case.recompute)
    model.blocks[1].up.requires_grad_(not case.frozen)
    return model


def train(case, compile_update=False):
    model, rank = _model(case), dist.get_rank() if dist.is_initialized() else 0
    units = [model.embedding, *model.blocks, model.head] if case.tables else [*model.blocks]
    scale = DynamicLossScale(init_scale=case.init_scale) if case.dtype == torch.float16 else None
    engine = ShardedEngine(
        model,
        OPTIMIZERS[case.optimizer],
        Precision(case.dtype, case.grad_dtype, scale, case.reduce_dtype),
        Sharding(units, bucket_size=case.bucket_size, overlap=case.overlap, shard=case.shard),
        clip_grad=case.clip_grad,
        grad_accum_steps=case.grad_accum_steps,
        compile_update=compile_update,
    )
    told = []

    def evaluate(seed):
        if case.evaluates:
            with torch.no_grad():
                told.append(float(loss_of(engine, make_batch(seed, 0, 0))))

    for step in range(case.steps):
        for micro_batch in range(case.grad_accum_steps):
            loss = loss_of(engine, make_batch(step, rank, micro_batch), case.flavour_at(step, rank))
            told.append(loss.item())
            evaluate(step)
            engine.backward(loss)
        result = engine.step()
        told += [float(result.loss), float(result.grad_norm), float(result.found_inf), float(result.loss_scale)]
        evaluate(100 + step)
    with engine.whole_parameters():
        half = {name: param.detach().clone() for name, param in model.named_parameters()}
    owned = [
        (one.spec.name, state, one.start, tensor.clone())
        for one in engine.owned_ranges()
        for state, tensor in one.tensors.items()
    ]
    return Seen(owned, half, told)


def _both(cases, compile_update):
    return [(train(case, compile_update), train(replace(case, shard="states"), compile_update)) for case in cases]


def _whole(ranks):
    found = {}
    for seen in ranks:
        for name, state, start, values in seen.owned:
            found.setdefault((name, state), {})[start] = values
    return {key: torch.cat([parts[start] for start in sorted(parts)]) for key, parts in found.items()}


def differences(case, got, want):
    """Return the differences from the run with "states", bit for bit. `got`, `want`: of every rank."""
    ours, kept = _whole(got), _whole(want)
    assert ours.keys() == kept.keys()
    assert any(state != MASTER for _, state in ours) or case.optimizer == "sgd"
    wrong = [f"{state} of {name}" for name, state in kept if not torch.equal(ours[name, state], kept[name, state])]
    for rank, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        wrong += [
            f"half {name} on rank {rank}" for name in theirs.half if not _same(mine.half[name], theirs.half[name])
        ]
        told = torch.tensor([mine.told, theirs.told], dtype=torch.float64)
        wrong += [f"what rank {rank} told: {told[:, ~_alike(*told)].tolist()}"] if not _alike(*told).all() else []
    return [f"{case}: {one}" for one in wrong]


def _alike(one, other):
    return (one == other) | (one.isnan() & other.isnan())  # no promise is made about the sign of a NaN


def _same(one, other):
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _check(cases, ranks):
    wrong = []
    for case, *by_rank in zip(cases, *ranks, strict=True):
        got, want = zip(*by_rank, strict=True)
        wrong += differences(case, got, want)
    assert wrong == []


@pytest.mark.parametrize("dp_size", [2, 3, 4, 8])
def test_ranks_compute_the_bits_of_the_kept_copy(run_ranks, dp_size):
    cases = _cases(dp_size, COUNTS[dp_size])
    _check(cases, run_ranks(_both, dp_size, cases, False, deadline_s=900.0))


def test_one_rank_computes_the_bits_of_the_kept_copy():
    cases = _cases(1, COUNTS[1])
    _check(cases, [_both(cases, False)])


def _added_by_owners(seed, dp_size, count):
    rng = random.Random(seed)
    return [
        plain.Case(
            *rng.choice(plain.AXES["dtypes"]), dp_size=dp_size, shard=rng.choice(["states", *SHARDS]),
            accumulate="owner", optimizer=rng.choice([*OPTIMIZERS]), bucket_size=rng.choice([1111, 10**9]),
            overlap=rng.random() < 0.5, grad_accum_steps=rng.choice([1, 2, 3]), clip_grad=rng.choice([0.0, 0.05]),
            tied=rng.random() < 0.5, recompute=rng.random() < 0.5,
        )
        for _ in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("dp_size", [2, 4])
def test_micro_batches_that_owners_add_up_equal_a_plain_loop(run_ranks, dp_size):
    cases = _added_by_owners(dp_size, dp_size, 40 if FULL else 5)
    wrong = run_ranks(check_cases, dp_size, cases, deadline_s=600.0)
    assert not any(wrong), "\n".join(sum(wrong, [])[:5])


def test_one_rank_adds_up_micro_batches_as_a_plain_loop_does():
    assert check_cases(_added_by_owners(1, 1, 20 if FULL else 5)) == []


def _engine(shard="parameters", group=None, compiled=False, grad_accum_steps=1):
    model = compiled_model(tied=False) if compiled else make_model(tied=False)
    return bf16_engine(model, shard=shard, topology=Topology.current(group), grad_accum_steps=grad_accum_steps)


READS = {
    "sum": lambda module, weight: weight.sum(),
    "copy": lambda module, weight: torch.zeros(40, 24).copy_(weight),
    "clone": lambda module, weight: weight.clone(),
    "data": lambda module, weight: weight.data,
    "numpy": lambda module, weight: weight.detach().float().numpy(),
    "item": lambda module, weight: weight[0, 0],
    "list": lambda module, weight: weight.tolist(),
    "norm of all": lambda module, weight: nn.utils.parameters_to_vector(module.parameters()),
    "a foreign forward": lambda module, weight: F.linear(torch.zeros(1, 24, dtype=torch.bfloat16), weight),
    "a unit's own layer": lambda module, weight: module.blocks[1].up(torch.zeros(1, 24, dtype=torch.bfloat16)),
    "torch.save": lambda module, weight: torch.save(weight, io.BytesIO()),
    "pickle": lambda module, weight: pickle.dumps(weight),
    "deepcopy": lambda module, weight: copy.deepcopy(module),
    "state_dict": lambda module, weight: module.state_dict(),
    "float": lambda module, weight: module.float(),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_of_values_that_are_not_there_is_refused(name):
    engine = _engine()
    weight = engine.module.blocks[1].up.weight
    with pytest.raises(RuntimeError, match=r"reads parameter \S+\w, which .* `with engine.whole_parameters\(\)"):
        READS[name](engine.module, weight)
    assert (weight.shape, weight.dtype, weight.requires_grad, weight.grad) == ((40, 24), torch.bfloat16, True, None)
    assert "in shards" in repr(weight)
    assert train_step(engine).grad_norm > 0
    with engine.whole_parameters():
        READS["sum"](engine.module, weight)
        READS["state_dict"](engine.module, weight)


@pytest.mark.parametrize(
    "write",
    [
        lambda module: module.load_state_dict(make_model().state_dict()),
        lambda module: nn.init.zeros_(module.blocks[1].up.weight),
    ],
)
def test_a_write_to_values_that_are_not_there_is_refused_with_the_call_to_use(write):
    engine = _engine()
    with pytest.raises(
        RuntimeError, match=r"parameter \S+\w, which has no memory.* engine\.load_weights\(state_dict\)"
    ):
        write(engine.module)
    assert train_step(engine).grad_norm > 0


def test_units_that_leave_out_much_of_the_model_are_told(caplog):
    """Log no tied table, which has two names and can be in no unit, and no norms."""
    for tied, units in ((True, slice(3)), (False, slice(3)), (False, slice(1))):
        model = make_model(tied)
        sharding = Sharding(units=[*model.blocks[units]], shard="parameters")
        bf16_engine(model, sharding=sharding)
    (said,) = (record.getMessage() for record in caplog.records)
    assert "5506 of 7539 parameters, such as embedding.weight, are in none of `units`, so" in said


def _one_reads_alone():
    engine = _engine()
    train_step(engine)
    state, weights = engine.state_dict(), engine.full_weights()
    with engine.whole_parameters():
        # A later reader in the block would read the values from before.
        for call, arguments in (("load_weights", [weights]), ("load_state_dict", [state]), ("publish_masters", [])):
            with pytest.raises(RuntimeError, match=rf"{call}\(\) inside engine.whole_parameters\(\): end the block"):
                getattr(engine, call)(*arguments)
        alone = float(loss_of(engine.module, make_batch(5, 0, 0))) if engine.topology.dp.rank else 0.0
        with pytest.raises(RuntimeError, match=r"step\(\) inside engine.whole_parameters\(\)"):
            train_step(engine)
        engine.discard_step()
        copied = copy.deepcopy(engine.module)
    with torch.no_grad():
        together = float(loss_of(engine.module, make_batch(5, 0, 0)))
        of_copy = float(loss_of(copied, make_batch(5, 0, 0)))
    return [alone, together, of_copy, float(train_step(engine, 1).grad_norm)]


def test_a_parameter_that_is_there_is_as_the_user_has_made_it():
    model = make_model()
    own = {param: (type(param), dict(vars(param))) for param in model.parameters()}
    engine = make_engine(model, shard="parameters")
    for step in range(2):
        train_step(engine, step)
        with engine.whole_parameters():
            assert {param: (type(param), dict(vars(param))) for param in model.parameters()} == own


def test_inside_whole_parameters_a_rank_may_go_alone(run_ranks):
    first, other = run_ranks(_one_reads_alone, 2)
    assert other[0] == other[1] == other[2] == first[1] == first[2]
    assert first[3] == other[3]


RECOMPUTES = ("none", "each", "together")
ORDERS = {  # blocks that a forward calls, by rank
    "one twice": ((0, 1, 1, 2), (0, 1, 1, 2)),
    "early exit of one rank": ((0, 1, 2), (0,)),
    "ranks leave out other ones": ((1, 2), (0, 2)),
    "none on one rank": ((0, 1, 2), ()),
    "last one first": ((2, 0, 1), (2, 0, 1)),
    "one twice, another left out by one rank": ((0, 1, 0), (0, 0)),
}


def _in_order(shard, order, recompute, *, inside=True, forwards=1):
    """Return the norms and losses of steps whose forward calls these blocks, from inside of the model's forward or
    outside. All `forwards` of a step come before all its backwards.
    """
    engine = _engine(shard, grad_accum_steps=forwards)
    model, rank, told = engine.module, engine.topology.dp.rank, []

    def forward(tokens):
        x = model.embedding(tokens) if inside else torch.ones(3, 6, 24, dtype=torch.bfloat16, requires_grad=True)
        blocks = [model.blocks[index] for index in order[rank]]
        if recompute == "together":  # in backward all blocks begin before the first one ends
            x = checkpoint(nn.Sequential(*blocks), x, use_reentrant=False)
        for block in blocks if recompute != "together" else ():
            x = checkpoint(block, x, use_reentrant=False) if recompute == "each" else block(x)
        return model.head(model.norm(x)) if inside else x

    for step in range(3):
        with mock.patch.object(model, "forward", forward):
            batches = [make_batch(step, rank, number) for number in range(forwards)]
            outs = [model(tokens) if inside else forward(tokens) for tokens in batches]
        losses = [out.float().square().mean() for out in outs]
        for loss in losses:
            engine.backward(loss)
        told += [*map(Tensor.item, losses), float(engine.step().grad_norm)]
    return told


@pytest.mark.parametrize("recompute", RECOMPUTES)
@pytest.mark.parametrize("order", ORDERS)
def test_whatever_units_a_forward_calls_the_bits_are_the_kept_copys(run_ranks, order, recompute):
    kept, passing = (run_ranks(_in_order, 2, shard, ORDERS[order], recompute) for shard in ("states", "parameters"))
    assert kept == passing


@pytest.mark.parametrize("order", ["early exit of one rank", "none on one rank", "ranks leave out other ones"])
def test_a_checkpoint_of_several_units_may_wait_for_its_backward(run_ranks, order):
    twice = partial(_in_order, forwards=2)
    kept, passing = (run_ranks(twice, 2, shard, ORDERS[order], "together") for shard in ("states", "parameters"))
    assert kept == passing


def test_a_step_forgets_which_units_were_called():
    """Free units that a later step leaves out: remembered calls would keep their memory to the end of its backward."""
    engine, held = _engine(), []
    train_step(engine)
    model = engine.module
    middle = next(bucket.params for bucket in engine.buckets if "blocks.1.gain" in bucket.named_params)
    model.embedding.weight.register_hook(lambda grad: held.append(middle.untyped_storage().nbytes()))

    def forward(tokens):
        return model.head(model.norm(model.blocks[2](model.blocks[0](model.embedding(tokens)))))

    with mock.patch.object(model, "forward", forward):
        loss = model(make_batch(1, 0, 0)).float().square().mean()
    engine.backward(loss)
    assert held == [0]


def _evaluates_otherwise(shard):
    engine, told = _engine(shard), []
    for step in range(3):
        with torch.set_grad_enabled(dist.get_rank() == 1):
            told.append(loss_of(engine.module, make_batch(100 + step, dist.get_rank(), 0)).item())
        told.append(float(train_step(engine, step).grad_norm))
    return told


def test_one_rank_may_evaluate_with_gradients(run_ranks):
    kept, passing = (run_ranks(_evaluates_otherwise, 2, shard) for shard in ("states", "parameters"))
    assert kept == passing


@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_units_may_be_called_outside_of_the_models_forward(run_ranks, recompute):
    orders = ((0, 1, 2), (0, 1, 2))
    outside = partial(_in_order, inside=False)
    kept, passing = (run_ranks(outside, 2, shard, orders, recompute) for shard in ("states", "parameters"))
    assert kept == passing


CALLS = {  # calls of one rank alone between its forward and its backward
    "wait": lambda engine: engine.wait(),
    "state_dict": lambda engine: engine.state_dict(),
    "owned_ranges": lambda engine: engine.owned_ranges(),
}


def _calls_alone(shard, call):
    engine, norms = _engine(shard), []
    for step in range(3):
        loss = loss_of(engine.module, make_batch(step, engine.topology.dp.rank, 0))
        if dist.get_rank():
            CALLS[call](engine)
        engine.backward(loss)
        norms.append(float(engine.step().grad_norm))
    return norms


@pytest.mark.parametrize("call", CALLS)
def test_a_rank_may_look_alone_between_forward_and_backward(run_ranks, call):
    kept, passing = (run_ranks(_calls_alone, 2, shard, call) for shard in ("states", "parameters"))
    assert kept == passing


class _Kinds(StepObserver):
    """Notes the kinds of launched transfers."""

    def __init__(self):
        self.kinds = []

    def on_transfer(self, kind, bucket, pending):
        self.kinds.append(kind)


def _gathers(shard="parameters"):
    """Return the number of gathers in a step, and the norms of three steps. The tied embedding is a unit without a
    parameter.
    """
    model = make_model(tied=True)
    sharding = Sharding([model.embedding, *model.blocks, model.norm], shard=shard)
    engine = bf16_engine(model, sharding=sharding)
    seen = _Kinds()
    with engine.observe(seen):
        norms = [float(train_step(engine, step).grad_norm) for step in range(3)]
    return seen.kinds.count("all_gather") // 3, norms


def test_the_last_unit_of_a_forward_is_not_gathered_again(run_ranks):
    kept, passing = (run_ranks(_gathers, 2, shard) for shard in ("states", "parameters"))
    assert [norms for _, norms in kept] == [norms for _, norms in passing]
    assert {count for count, _ in passing} == {1 + 4 + 3}  # root and four units; in backward the first three again


def test_a_users_hook_of_before_the_engine_reads_its_units_parameters():
    model, seen = make_model(tied=False), []
    model.blocks[1].register_forward_pre_hook(lambda module, args: seen.append(float(module.up.weight.sum())))
    sharding = Sharding([*model.blocks], shard="parameters")
    engine = bf16_engine(model, sharding=sharding)
    with engine.whole_parameters():
        want = float(model.blocks[1].up.weight.sum())
    engine.backward(loss_of(model, make_batch(0, 0, 0)))
    assert seen == [want]


class _PlantedError(Exception):
    pass


def _fails_amid(forward):
    engine = _engine()
    where = engine.module.blocks[1]
    plant = where.register_forward_hook if forward else where.register_full_backward_hook

    def fails(*_):
        raise _PlantedError

    hook = plant(fails)
    with pytest.raises(_PlantedError):
        train_step(engine)
    hook.remove()
    engine.discard_step()
    flats = (flat for bucket in engine.buckets for flat in (bucket.params, bucket.grads))
    held = sum(flat.untyped_storage().nbytes() for flat in flats)
    return [float(held), *(float(train_step(engine, step).grad_norm) for step in range(2))]


@pytest.mark.parametrize("forward", [True, False])
def test_a_pass_that_fails_leaves_nothing_behind(run_ranks, forward):
    want = [0.0, *run_ranks(_norms, 2)[0]]
    assert run_ranks(_fails_amid, 2, forward) == [want, want]


def _norms(shard="states", compiled=False):
    engine = _engine(shard, compiled=compiled)
    return [float(train_step(engine, step).grad_norm) for step in range(2)]


def test_compiled_blocks_compute_the_bits_of_the_kept_copy(run_ranks):
    kept, passing = (run_ranks(_norms, 2, shard, True) for shard in ("states", "parameters"))
    assert kept == passing


@dataclass
class _Given:
    hidden: Tensor


class _Router(nn.Module):
    """A unit that returns a dataclass, and keeps a loss as an attribute that nothing else leads to."""

    def __init__(self):
        super().__init__()
        self.gain, self.gate = nn.Parameter(torch.full((24,), 0.5)), nn.Parameter(torch.full((24,), 0.25))

    def forward(self, x):
        self.balance = (x.detach() * self.gate * self.gate).float().square().mean()
        return _Given(x * self.gain * self.gain)


class _Foreign(nn.Module):
    """Two routers between blocks that share a layer, which therefore belongs to neither."""

    def __init__(self):
        super().__init__()
        self.body = make_model(tied=False)
        self.routers = nn.ModuleList(_Router() for _ in range(2))
        self.body.blocks[2].down = self.body.blocks[0].down

    def forward(self, tokens, flavour):
        x = self.body.embedding(tokens)
        for block, router in zip(self.body.blocks, self.routers, strict=False):
            x = router(block(x)).hidden
        return self.body.head(self.body.blocks[2](x))


def _foreign(shard):
    model = _Foreign()
    sharding = Sharding([*model.body.blocks, *model.routers], shard=shard)
    engine = bf16_engine(model, sharding=sharding)
    norms = []
    for step in range(3):
        loss = loss_of(engine, make_batch(step, dist.get_rank(), 0))
        engine.backward(loss + model.routers[0].balance + model.routers[1].balance)
        norms.append(float(engine.step().grad_norm))
    return norms


def test_what_a_unit_gives_in_other_ways_and_shares_has_the_bits_of_the_kept_copy(run_ranks):
    kept, passing = (run_ranks(_foreign, 2, shard) for shard in ("states", "parameters"))
    assert kept == passing


def _fails_alone(shard, where, with_grad):
    engine = _engine(shard)

    def fails(*_):
        raise _PlantedError

    train_step(engine)
    hook = engine.module.blocks[where].register_forward_pre_hook(fails) if dist.get_rank() else None
    with torch.set_grad_enabled(with_grad), nullcontext() if hook is None else pytest.raises(_PlantedError):
        engine(make_batch(0, 0, 0))
    if hook is not None:
        hook.remove()
    if with_grad:
        engine.discard_step()
    return [float(train_step(engine, step).grad_norm) for step in range(1, 3)]


@pytest.mark.parametrize(("where", "with_grad"), [(0, False), (0, True), (2, False)])
def test_a_forward_that_fails_on_one_rank_leaves_the_gathers_in_step(run_ranks, where, with_grad):
    kept, passing = (run_ranks(_fails_alone, 2, shard, where, with_grad) for shard in ("states", "parameters"))
    assert kept == passing


def test_gradients_of_ones_own_are_refused_by_the_units_name():
    engine = _engine()
    hidden = torch.ones(3, 24, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"blocks.2 is differentiated outside of engine.backward\(loss\)"):
        torch.autograd.grad(engine.module.blocks[2](hidden).float().sum(), hidden)
    with pytest.raises(RuntimeError, match=r"blocks.2 is called within a transform of torch.func"):
        torch.vmap(engine.module.blocks[2])(hidden)
    with engine.whole_parameters():
        (grad,) = torch.autograd.grad(engine.module.blocks[2](hidden).float().sum(), hidden)
    assert grad.shape == hidden.shape


def test_parameters_that_others_share_stay_in_memory(caplog):
    told = []
    for shard in ("states", "parameters"):
        model = make_model(tied=False)
        engine = make_engine(model, shard=shard)
        with engine.whole_parameters():
            array = model.blocks[1].up.weight.detach().numpy()
            model.blocks[2].share_memory()
        told.append([float(train_step(engine, step).grad_norm) for step in range(2)])
    assert told[0] == told[1]
    assert array.shape == (40, 24)
    assert caplog.text.count("a NumPy array or another process shares them") == 2  # once for each unit


def _calls_a_unit_twice():
    group = dist.new_group([0, 1], timeout=timedelta(seconds=4))
    engine = _engine(group=group)
    blocks = engine.module.blocks
    if dist.get_rank():
        blocks[2].register_forward_pre_hook(lambda module, args: (blocks[0](*args),))
    try:
        with torch.no_grad():  # in a backward the others could wait for a sum first
            engine(make_batch(0, 0, 0))
            engine(make_batch(0, 0, 0))
    except RuntimeError as error:
        return "".join(traceback.format_exception(error))
    return ""


def test_a_unit_that_one_rank_calls_twice_is_named(run_ranks):
    first, other = run_ranks(_calls_a_unit_twice, 2, deadline_s=40.0)
    assert "while the weights of blocks.0 were gathered" in other
    assert "every rank must call the model, its units and their backward equally often" in first


def test_wrong_settings_are_refused():
    model = make_model()
    with pytest.raises(ValueError, match="must be 'states' or 'gradients' or 'parameters', got 'all'"):
        Sharding([*model.blocks], shard="all")
    with pytest.raises(ValueError, match=r"pass e\.g\. units=\[\*model\.blocks\]"):
        Sharding(shard="parameters")
    for units, wrong in (([model], "TinyModel is not one"), ([model.blocks[0]] * 2, "Block is given twice")):
        with pytest.raises(ValueError, match=f"different submodules of the model; {wrong}"):
            ShardedEngine(model, AdamW(lr=0.01), Precision(torch.bfloat16), Sharding(units, shard="parameters"))
    sharding = Sharding([model.blocks[0], model.blocks[0].up], shard="parameters")
    with pytest.raises(ValueError, match="must not contain another unit, but a Block does"):
        ShardedEngine(model, AdamW(lr=0.01), Precision(torch.bfloat16), sharding)
