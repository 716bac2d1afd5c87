"""Every way of reading weights after `step()` gives that step's: state_dict, named_parameters, copies,
pickles, submodules; with units after `state_dict()` or `engine.wait()`; copies live apart from the engine.

Gathers land when they are awaited and not before. Until then the elements of other ranks are NaN.
"""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch

from megamix import AdamW, Sharding
from tests.builders import BF16, loss_of, make_batch, make_engine, make_model, train_step
from tests.conftest import FULL
from tests.distributed.late_gather import late_gathers


def _of_one_submodule(module, step):
    submodules = [one for one in module.modules() if any(True for _ in one.parameters())]
    return submodules[step % len(submodules)].state_dict()


def _saved(module, step):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False).state_dict()


def _evaluated(module, step):
    with torch.no_grad():
        return {"logits": module(make_batch(step, 0, 1))}


# Each reads a module's weights after a step.
BY_STATE_DICT = {
    "state_dict": lambda module, step: module.state_dict(),
    "state_dict of a submodule": _of_one_submodule,
    "evaluation": _evaluated,
}
COPIES = {
    "torch.save(module)": _saved,
    "pickle": lambda module, step: pickle.loads(pickle.dumps(module)).state_dict(),
    "deepcopy": lambda module, step: copy.deepcopy(module).state_dict(),
    "deepcopy of a submodule": lambda module, step: copy.deepcopy(module.blocks[step % 3].up).state_dict(),
}
OTHERS = {
    "named_parameters": lambda module, step: dict(module.named_parameters()),
    "call of a submodule": lambda module, step: {"row": module.embedding(torch.arange(5))},
}
READS = BY_STATE_DICT | COPIES | OTHERS


def _engine(units):
    model = make_model()
    sharding = Sharding(units=[*model.blocks] if units else [], bucket_size=1500)
    return make_engine(model, AdamW(lr=0.05), BF16, sharding)


def _of_masters(engine):
    """Return a plain module with the weights that every read should have given."""
    plain = make_model()
    plain.load_state_dict(engine.full_weights())
    return plain.bfloat16()


def _stale(units, names, steps, waits=False):
    """Return the stale tensors of each way of reading, over all steps."""
    found = []
    with late_gathers():
        for name in names:
            engine = _engine(units)
            for step in range(steps):
                train_step(engine, step)
                if step % 2:
                    engine.load_state_dict(engine.state_dict())  # sends all weights again
                if waits:
                    engine.wait()
                got = {key: value.detach().clone() for key, value in READS[name](engine.module, step).items()}
                want = READS[name](_of_masters(engine), step)
                assert got.keys() == want.keys() != set()
                found += [(name, step, key) for key in want if not torch.equal(got[key], want[key])]
    return found


STEPS = 20 if FULL else 2
RANKS = [2, 4] if FULL else [2]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    ("units", "names", "waits"),
    [(False, [*READS], False), (True, [*BY_STATE_DICT], False), (True, [*COPIES, *OTHERS], True)],
    ids=["without units, any way", "with units, by state_dict", "with units, after engine.wait()"],
)
def test_a_read_after_a_step_or_load_is_of_it(run_ranks, ranks, units, names, waits):
    stale = run_ranks(_stale, ranks, units, names, STEPS, waits, deadline_s=900.0 if FULL else 120.0)
    assert stale == [[]] * ranks


def _refused_copies():
    """Copy in each way while gathers are under way. Then the next step trains as if no copy had been tried."""
    with late_gathers():
        engine = _engine(units=True)
        train_step(engine, 0)
        for copies in COPIES.values():
            with pytest.raises(RuntimeError, match=r"call engine.wait\(\) before"):
                copies(engine.module, 0)
        train_step(engine, 1)
        engine.wait()
        _holds_the_masters(engine.module, engine)


def _holds_the_masters(module, engine):
    want = _of_masters(engine).state_dict()
    assert [name for name, value in module.state_dict().items() if not torch.equal(value, want[name])] == []


def test_a_copy_while_gathers_are_under_way_is_refused(run_ranks):
    run_ranks(_refused_copies, 2)


def _live_apart_from_the_engine():
    """Let a copy and a pickle go on by themselves: they keep no engine alive, await nothing, and train under an engine
    of their own.
    """
    with late_gathers() as begun:
        engine = _engine(units=True)
        train_step(engine, 0)
        engine.wait()
        copied, unpickled = copy.deepcopy(engine.module), pickle.loads(pickle.dumps(engine.module))
        before = {name: value.clone() for name, value in copied.state_dict().items()}
        train_step(engine, 1)  # gathers are under way now
        for one in (copied, unpickled):
            one.state_dict(), loss_of(one, make_batch(1, 0, 0))
        assert any(not gather.done for gather in begun)
        assert all(torch.equal(value, before[name]) for name, value in copied.state_dict().items())
        engine.wait()
        module, held = engine.module, [weakref.ref(one) for one in (engine, *(one.master for one in engine.buckets))]
        del engine
        gc.collect()
        assert all(one() is None for one in held)  # although the module and its copies live on
        assert torch.isfinite(loss_of(module, make_batch(2, 0, 0)))
        second = make_engine(unpickled, AdamW(lr=0.05), BF16, shard="states")
        train_step(second, 2)
        second.wait()
        _holds_the_masters(unpickled, second)


def test_copies_live_apart_from_the_engine(run_ranks):
    run_ranks(_live_apart_from_the_engine, 2)
