"""With `Sharding(shard="parameters")` losses and norms are those of "states", whatever units ranks call, in whatever
order, and if one rank evaluates, looks at its state or fails alone. What has no memory is refused to whoever reads or
writes it, or is there in backward, too. The turn from forward to backward gathers nothing again. Ranks whose passes
diverge get errors that name the unit or the gradients for which they wait: no rank gets the weights of another unit or
step, and no process dies. If all ranks end a step, they can continue.
"""

import copy
import functools
import gc
import io
import pickle
import re
import threading
import traceback
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from megamix import AdamW, Precision, ShardedEngine, Sharding
from megamix.comm.topology import Topology
from megamix.mixed_precision.observer import StepObserver
from tests.builders import bf16_engine, compiled_model, loss_of, make_batch, make_engine, make_model, train_step

_TIMEOUT_S = 3  # seconds of a wait that nobody ends


def _engine(shard="parameters", model=None, **settings):
    return bf16_engine(model or make_model(tied=False), shard=shard, **settings)


def _norm(engine, step=0):
    return float(train_step(engine, step).grad_norm)


def _evaluate(engine, step=9):
    with torch.no_grad():
        return float(loss_of(engine.module, make_batch(step, 0, 0)))


READS = {
    "sum": lambda module, weight: weight.sum(),
    "data": lambda module, weight: weight.data,
    "numpy": lambda module, weight: weight.detach().float().numpy(),
    "item": lambda module, weight: weight[0, 0],
    "a foreign forward": lambda module, weight: F.linear(torch.zeros(1, 24, dtype=torch.bfloat16), weight),
    "a unit's own layer": lambda module, weight: module.blocks[1].up(torch.zeros(1, 24, dtype=torch.bfloat16)),
    "torch.save": lambda module, weight: torch.save(weight, io.BytesIO()),
    "pickle": lambda module, weight: pickle.dumps(weight),
    "deepcopy": lambda module, weight: copy.deepcopy(module),
    "state_dict": lambda module, weight: module.state_dict(),
    "float": lambda module, weight: module.float(),
}


WRITES = {
    "load_state_dict": lambda module, weight: module.load_state_dict(make_model().state_dict()),
    "init": lambda module, weight: nn.init.zeros_(weight),
}


@pytest.mark.parametrize("name", READS | WRITES)
def test_a_read_or_write_of_values_that_are_not_there_is_refused_with_the_call_to_use(name):
    engine = _engine()
    weight = engine.module.blocks[1].up.weight
    told = r"parameter \S+\w, which has no memory.* engine\.load_weights\(state_dict\)"
    told = r"reads parameter \S+\w, which .* `with engine.whole_parameters\(\)" if name in READS else told
    with pytest.raises(RuntimeError, match=told):
        (READS | WRITES)[name](engine.module, weight)
    assert (weight.shape, weight.dtype, weight.requires_grad, weight.grad) == ((40, 24), torch.bfloat16, True, None)
    assert "in shards" in repr(weight)
    assert train_step(engine).grad_norm > 0
    with engine.whole_parameters():
        READS["sum"](engine.module, weight)


def test_units_that_leave_out_much_of_the_model_are_told(caplog):
    """Log no tied table, which has two names and can be in no unit, and no norms."""
    for tied, units in ((True, 3), (False, 3), (False, 1)):
        model = make_model(tied)
        bf16_engine(model, sharding=Sharding([*model.blocks[:units]], shard="parameters"))
    (said,) = (record.getMessage() for record in caplog.records)
    assert "5506 of 7539 parameters, such as embedding.weight, are in none of `units`, so" in said


def test_a_parameter_that_is_there_is_as_the_user_has_made_it():
    model = make_model()
    own = {param: (type(param), dict(vars(param))) for param in model.parameters()}
    engine = make_engine(model, shard="parameters")
    for step in range(2):
        train_step(engine, step)
        with engine.whole_parameters():
            assert {param: (type(param), dict(vars(param))) for param in model.parameters()} == own


def _one_reads_alone():
    engine = _engine()
    train_step(engine)
    state, weights, batch = engine.state_dict(), engine.full_weights(), make_batch(5, 0, 0)
    with engine.whole_parameters():
        # A later reader in the block would read the values from before.
        for call, arguments in (("load_weights", [weights]), ("load_state_dict", [state]), ("publish_masters", [])):
            with pytest.raises(RuntimeError, match=rf"{call}\(\) inside engine.whole_parameters\(\): end the block"):
                getattr(engine, call)(*arguments)
        alone = float(loss_of(engine.module, batch)) if dist.get_rank() else None
        with pytest.raises(RuntimeError, match=r"step\(\) inside engine.whole_parameters\(\)"):
            train_step(engine)
        engine.discard_step()
        copied = copy.deepcopy(engine.module)
    together = _evaluate(engine, 5)
    with torch.no_grad():
        assert together == float(loss_of(copied, batch))
    assert alone in (None, together)
    return _norm(engine, 1)


def test_inside_whole_parameters_a_rank_may_go_alone(run_ranks):
    assert len({*run_ranks(_one_reads_alone, 2)}) == 1


RECOMPUTES, IN_TURN = ("none", "each", "together"), ((0, 1, 2), (0, 1, 2))
ORDERS = {  # blocks that a forward calls, by rank
    "one twice": ((0, 1, 1, 2), (0, 1, 1, 2)),
    "early exit of one rank": ((0, 1, 2), (0,)),
    "ranks leave out other ones": ((1, 2), (0, 2)),
    "none on one rank": ((0, 1, 2), ()),
    "last one first": ((2, 0, 1), (2, 0, 1)),
    "one twice, another left out by one rank": ((0, 1, 0), (0, 0)),
}


def _in_order(shard, order, recompute="none", inside=True, forwards=1):
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

    for step in range(2):
        with mock.patch.object(model, "forward", forward):
            batches = [make_batch(step, rank, number) for number in range(forwards)]
            outs = [model(tokens) if inside else forward(tokens) for tokens in batches]
        losses = [out.float().square().mean() for out in outs]
        for loss in losses:
            engine.backward(loss)
        told += [*map(Tensor.item, losses), float(engine.step().grad_norm)]
    return told


@pytest.fixture(scope="module")
def kept(run_ranks):
    """`kept(case, ...)` is the result of the kept copy, which no recompute changes."""
    return functools.cache(lambda case, *args: run_ranks(case, 2, "states", *args))


@pytest.mark.parametrize("recompute", RECOMPUTES)
@pytest.mark.parametrize("order", ORDERS)
def test_whatever_units_a_forward_calls_the_bits_are_the_kept_copys(run_ranks, kept, order, recompute):
    assert run_ranks(_in_order, 2, "parameters", ORDERS[order], recompute) == kept(_in_order, ORDERS[order])


@pytest.mark.parametrize("order", ["early exit of one rank", "none on one rank", "ranks leave out other ones"])
def test_a_checkpoint_of_several_units_may_wait_for_its_backward(run_ranks, kept, order):
    wanted = kept(_in_order, ORDERS[order], "none", True, 2)
    assert run_ranks(_in_order, 2, "parameters", ORDERS[order], "together", True, 2) == wanted


def _evaluates_otherwise(shard):
    engine, told = _engine(shard), []
    for step in range(3):
        with torch.set_grad_enabled(dist.get_rank() == 1):
            told.append(loss_of(engine.module, make_batch(100 + step, dist.get_rank(), 0)).item())
        told.append(_norm(engine, step))
    return told


def _looks_alone(shard):
    """Let one rank look at its state alone between its forward and its backward."""
    engine, norms = _engine(shard), []
    for step, call in enumerate((engine.wait, engine.state_dict, engine.owned_ranges)):
        loss = loss_of(engine.module, make_batch(step, engine.topology.dp.rank, 0))
        if dist.get_rank():
            call()
        engine.backward(loss)
        norms.append(float(engine.step().grad_norm))
    return norms


def _gathers(shard="parameters"):
    """Return the number of gathers in a step, and the norms of three steps. The tied embedding is a unit without a
    parameter.
    """
    model = make_model(tied=True)
    engine = bf16_engine(model, sharding=Sharding([model.embedding, *model.blocks, model.norm], shard=shard))
    kinds, observer = [], StepObserver()
    observer.on_transfer = lambda kind, bucket, pending: kinds.append(kind)
    with engine.observe(observer):
        norms = [_norm(engine, step) for step in range(3)]
    return kinds.count("all_gather") // 3, norms


def test_the_last_unit_of_a_forward_is_not_gathered_again(run_ranks):
    wanted, passing = (run_ranks(_gathers, 2, shard) for shard in ("states", "parameters"))
    assert [norms for _, norms in wanted] == [norms for _, norms in passing]
    assert {count for count, _ in passing} == {1 + 4 + 3}  # root and four units; in backward the first three again


def test_a_users_hook_of_before_the_engine_reads_its_units_parameters():
    model, seen = make_model(tied=False), []
    model.blocks[1].register_forward_pre_hook(lambda module, args: seen.append(float(module.up.weight.sum())))
    engine = bf16_engine(model, shard="parameters")
    with engine.whole_parameters():
        want = float(model.blocks[1].up.weight.sum())
    engine.backward(loss_of(model, make_batch(0, 0, 0)))
    assert seen == [want]


class _PlantedError(Exception):
    pass


def _fails(*_):
    raise _PlantedError


def _compiled(shard):
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    model = compiled_model(tied=False, compiled=False)
    for block in model.blocks:
        block.compile(dynamic=False, backend="aot_eager")  # what the compiler makes of a graph is not the point
    engine = _engine(shard, model)
    norms = [_norm(engine, step) for step in range(2)]
    assert counters["stats"]["unique_graphs"] - before == 1  # all blocks share one, and the engine's hooks split none
    return norms


def test_compiled_blocks_compute_the_bits_of_the_kept_copy(run_ranks, kept):
    assert run_ranks(_compiled, 2, "parameters") == kept(_compiled)


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
    engine = bf16_engine(model, sharding=Sharding([*model.body.blocks, *model.routers], shard=shard))
    norms = []
    for step in range(3):
        loss = loss_of(engine, make_batch(step, dist.get_rank(), 0))
        engine.backward(loss + model.routers[0].balance + model.routers[1].balance)
        norms.append(float(engine.step().grad_norm))
    return norms


def held_bytes(engine):
    """Return the memory of half parameters and gradients."""
    return sum(flat.untyped_storage().nbytes() for bucket in engine.buckets for flat in (bucket.params, bucket.grads))


def _fails_alone(shard, where, with_grad):
    engine = _engine(shard)
    train_step(engine)
    alone = mock.patch.object(engine.module.blocks[where], "forward", _fails) if dist.get_rank() else nullcontext()
    with torch.set_grad_enabled(with_grad), alone, suppress(_PlantedError):
        engine(make_batch(0, 0, 0))
    if with_grad:
        engine.discard_step()
        assert shard == "states" or held_bytes(engine) == 0
    return [_norm(engine, step) for step in range(1, 3)]


class _Gated(nn.Module):
    """A block with a loss of its own, which it puts into a list. `alone`: nothing else has a gradient."""

    def __init__(self, block, losses, alone):
        super().__init__()
        self.block, self.gate, self.alone = block, nn.Parameter(torch.full((24,), 0.5)), alone
        self._losses = losses

    def forward(self, x):
        y = self.block(x)
        self._losses.append((y * self.gate * self.gate).float().square().mean())
        return y.detach() if self.alone else y


def _reads_beside(shard, alone, overlap):
    model, losses = make_model(tied=False), []
    model.blocks = nn.ModuleList(_Gated(block, losses, alone) for block in model.blocks)
    engine = bf16_engine(model, sharding=Sharding([*model.blocks], shard=shard, overlap=overlap))
    norms = []
    for step in range(3):
        loss = loss_of(model, make_batch(step, dist.get_rank(), 0))
        with engine.whole_parameters():  # after the forward; its backward comes first
            penalty = sum((block.gate[:12] * block.gate[12:]).float().sum() for block in model.blocks)
        loss = 0.1 * penalty + sum(losses) + (0.0 if alone else loss)
        losses.clear()
        _evaluate(engine)  # frees the units that a forward keeps
        losses.clear()
        engine.backward(loss)
        norms.append(float(engine.step().grad_norm))
    return norms


WAYS = {
    "a forward that fails on one rank": (_fails_alone, 0, True),
    "an evaluation that fails on one rank": (_fails_alone, 0, False),
    "an evaluation that fails late on one rank": (_fails_alone, 2, False),
    "an evaluation with gradients on one rank": (_evaluates_otherwise,),
    "a look of one rank between forward and backward": (_looks_alone,),
    "units that return a dataclass, keep a loss, or share a layer": (_foreign,),
    "a loss that reads beside a unit's output": (_reads_beside, False, True),
    "a loss that reads beside a unit's output, without overlap": (_reads_beside, False, False),
    "a loss that reads nothing else": (_reads_beside, True, True),
    "a loss that reads nothing else, without overlap": (_reads_beside, True, False),
    **{f"units called outside of the model, recompute {one}": (_in_order, IN_TURN, one, False) for one in RECOMPUTES},
}


@pytest.mark.parametrize("way", WAYS)
def test_whatever_ranks_do_the_bits_are_the_kept_copys(run_ranks, kept, way):
    case, *args = WAYS[way]
    assert run_ranks(case, 2, "parameters", *args) == kept(case, *args)


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
        told.append([_norm(engine, step) for step in range(2)])
    assert told[0] == told[1]
    assert array.shape == (40, 24)
    assert caplog.text.count("a NumPy array or another process shares them") == 2  # once for each unit


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


def _backward_fails(engine, step, where):
    hook = engine.module.blocks[where].register_full_backward_hook(_fails)
    with pytest.raises(_PlantedError):
        engine.backward(loss_of(engine.module, make_batch(step, engine.topology.dp.rank, 0)))
    hook.remove()


def _one_fails_and_repeats(engine):
    if dist.get_rank():
        _backward_fails(engine, 0, 2)
    train_step(engine)


def _one_evaluates_more(engine):
    engine.backward(loss_of(engine.module, make_batch(0, 0, 0)))
    if dist.get_rank():
        _evaluate(engine)
    engine.step()


def _one_loads_first(engine):
    weights = {name: 2 * weight for name, weight in engine.full_weights().items()}
    if dist.get_rank():
        engine.load_weights(weights)
    _evaluate(engine)


def _one_calls_a_unit_twice(engine):
    blocks = engine.module.blocks
    if dist.get_rank():
        blocks[2].register_forward_pre_hook(lambda module, args: (blocks[0](*args),))
    _evaluate(engine)  # in a backward the others could wait for a sum first
    _evaluate(engine)


ROOT = "while the weights of the model outside its units were gathered: every rank must call the model"
PARTINGS = {  # and the errors of the two ranks
    "one rank's backward fails, and it repeats its step": (
        _one_fails_and_repeats,
        r"while the gradients of blocks.1.down.weight to blocks.1.gain were summed: every rank must call backward",
        ROOT,
    ),
    "one rank evaluates more often": (
        _one_evaluates_more,
        r"while the ranks agreed on a step: every rank must call step\(\) as often",
        ROOT,
    ),
    "one rank loads weights first": (_one_loads_first, ROOT, ROOT),
    "one rank calls a unit twice": (
        _one_calls_a_unit_twice,
        "every rank must call the model, its units and their backward equally often",
        r"while the weights of blocks.0 were gathered",
    ),
}


def _part(name):
    engine = _engine(topology=Topology.current(dist.new_group([0, 1], timeout=timedelta(seconds=_TIMEOUT_S))))
    train_step(engine)
    try:
        PARTINGS[name][0](engine)
    except RuntimeError as error:
        return "".join(traceback.format_exception(error))
    return ""


@pytest.mark.parametrize("name", PARTINGS)
def test_ranks_that_part_ways_are_told_by_name(run_ranks, name):
    said = run_ranks(_part, 2, name, deadline_s=40.0)
    for text, told in zip(said, PARTINGS[name][1:], strict=True):
        assert re.search(told, text), text


def _one_fails_and_all_discard(where):
    engine = _engine(grad_accum_steps=2)
    if where is not None:
        if dist.get_rank():
            _backward_fails(engine, 5, where)
            engine.discard_step()
        else:
            engine.backward(loss_of(engine.module, make_batch(5, 0, 0)))
        dist.barrier()  # as ranks may tell each other of the error
        engine.discard_step()
        assert held_bytes(engine) == 0
    norms = []
    for step in range(2):
        for micro_batch in range(2):
            engine.backward(loss_of(engine.module, make_batch(step, dist.get_rank(), micro_batch)))
        norms.append(float(engine.step().grad_norm))
    return norms


def test_after_a_backward_that_fails_on_one_rank_all_may_discard_and_go_on(run_ranks):
    want, *ends = (run_ranks(_one_fails_and_all_discard, 2, where, deadline_s=40.0) for where in (None, 0, 2))
    assert ends == [want] * 2


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_second_thread_inside_the_model_is_refused_by_the_units_name(when):
    engine = _engine()
    block, inside, go = engine.module.blocks[1], threading.Event(), threading.Event()

    def waits(*_):
        inside.set()
        assert go.wait(20.0)

    hook = (block.register_forward_hook if when == "forward" else block.register_full_backward_hook)(waits)
    norms = []
    thread = threading.Thread(target=lambda: norms.append(_norm(engine)))
    thread.start()
    assert inside.wait(20.0)
    hook.remove()
    with pytest.raises(RuntimeError, match=r"^the model.* is called while another thread is inside"):
        _evaluate(engine)
    with pytest.raises(RuntimeError, match=r"^blocks.0.* is called while another thread is inside"):
        engine.module.blocks[0](torch.ones(3, 24))
    go.set()
    thread.join()
    other = _engine()
    assert [*norms, _norm(engine, 1)] == [_norm(other), _norm(other, 1)]


def test_a_module_whose_engine_was_dropped_amid_a_step_says_so():
    engine = _engine()
    model = engine.module
    loss = loss_of(model, make_batch(0, 0, 0))
    del engine
    gc.collect()
    with pytest.raises(ValueError, match="parameter embedding.weight belongs to another engine, or did"):
        make_engine(model, shard="parameters")
    with pytest.raises(RuntimeError, match="a backward through a module whose engine is gone"):
        loss.backward()
