"""Whoever writes a loop in which ranks take different ways: with `Sharding(shard="parameters")` ranks whose passes
diverge get errors that name the unit or the gradients for which they wait: no rank gets the weights of another unit or
step, and no process dies. If all ranks end a step, they can continue. Code that reads weights outside a unit's output
also has them in backward, or is refused.
"""

import gc
import re
import threading
import traceback
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megamix import Sharding
from tests.builders import bf16_engine, loss_of, make_batch, make_engine, make_model, train_step
from tests.distributed.test_shard import _engine, _fails, _PlantedError, held_bytes

_TIMEOUT_S = 3  # seconds of a wait that nobody ends


def _norm(engine, step=0):
    return float(train_step(engine, step).grad_norm)


def _backward_fails(engine, step, where):
    hook = engine.module.blocks[where].register_full_backward_hook(_fails)
    with pytest.raises(_PlantedError):
        engine.backward(loss_of(engine.module, make_batch(step, engine.topology.dp.rank, 0)))
    hook.remove()


def _evaluate(engine):
    with torch.no_grad():
        return float(loss_of(engine.module, make_batch(9, 0, 0)))


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
    engine = _engine(group=dist.new_group([0, 1], timeout=timedelta(seconds=_TIMEOUT_S)))
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


@pytest.mark.parametrize("where", [0, 2])
def test_after_a_backward_that_fails_on_one_rank_all_may_discard_and_go_on(run_ranks, where):
    want = run_ranks(_one_fails_and_all_discard, 2, None)
    assert run_ranks(_one_fails_and_all_discard, 2, where, deadline_s=40.0) == want


class _Gated(nn.Module):
    """A block with a loss of its own, which it puts into a list. `alone`: nothing else has a gradient."""

    def __init__(self, block, losses, alone):
        super().__init__()
        self.block, self.gate, self.alone = block, nn.Parameter(torch.full((24,), 0.5)), alone
        self._losses = losses  # private, since public attributes are looked at

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


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("alone", [True, False])
def test_what_a_loss_reads_beside_a_units_output_is_gathered(run_ranks, alone, overlap):
    kept, passing = (run_ranks(_reads_beside, 2, shard, alone, overlap) for shard in ("states", "parameters"))
    assert kept == passing


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
