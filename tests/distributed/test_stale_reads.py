"""Every way of reading weights after `step()` gives that step's: state_dict, named_parameters, averages, copies,
pickles, submodules; with units after `state_dict()` or `engine.wait()`; copies live apart from the engine.

Gathers land when they are awaited and not before. Until then the elements of other ranks are NaN.
"""

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from megamix import AdamW, Sharding
from tests.builders import BF16, loss_of, make_batch, make_engine, make_model, train_step
from tests.conftest import FULL
from tests.distributed.late_gather import late_gathers

Read = Callable[[nn.Module, int], dict[str, Tensor]]  # reads a module's weights after a step


def _of_one_submodule(module, step):
    submodules = [one for one in module.modules() if any(True for _ in one.parameters())]
    return submodules[step % len(submodules)].state_dict()


def _averaged(module, step):
    average = AveragedModel(make_model(), avg_fn=lambda average, weight, count: weight.float())
    average.update_parameters(module)
    average.update_parameters(module)
    return average.module.state_dict()


def _saved(what):
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _evaluated(module, step):
    with torch.no_grad():
        return {"logits": module(make_batch(step, 0, 1))}


BY_STATE_DICT = {
    "state_dict": lambda module, step: module.state_dict(),
    "state_dict of a submodule": _of_one_submodule,
    "torch.save(state_dict)": lambda module, step: _saved(module.state_dict()),
    "evaluation": _evaluated,
}
COPIES = {
    "torch.save(module)": lambda module, step: _saved(module).state_dict(),
    "pickle": lambda module, step: pickle.loads(pickle.dumps(module)).state_dict(),
    "deepcopy": lambda module, step: copy.deepcopy(module).state_dict(),
    "deepcopy of a submodule": lambda module, step: copy.deepcopy(module.blocks[step % 3].up).state_dict(),
}
OTHERS = {
    "named_parameters": lambda module, step: dict(module.named_parameters()),
    "AveragedModel.update_parameters": _averaged,
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
    """Return (stale tensors, tensors) over all steps for each way of reading."""
    found = {}
    with late_gathers():
        for name in names:
            engine, stale, count = _engine(units), 0, 0
            for step in range(steps):
                train_step(engine, step)
                if waits:
                    engine.wait()
                got = {key: value.detach().clone() for key, value in READS[name](engine.module, step).items()}
                want = READS[name](_of_masters(engine), step)
                assert got.keys() == want.keys()
                count += len(got)
                stale += sum(not torch.equal(got[key], want[key]) for key in want)
            found[name] = stale, count
    return found


STEPS = 20 if FULL else 2
RANKS = [2, 4] if FULL else [2]


@pytest.mark.uncounted
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    ("units", "names", "waits"),
    [(False, [*READS], False), (True, [*BY_STATE_DICT], False), (True, [*COPIES, *OTHERS], True)],
    ids=["without units, any way", "with units, by state_dict", "with units, after engine.wait()"],
)
def test_a_read_after_a_step_is_of_this_step(run_ranks, ranks, units, names, waits):
    for found in run_ranks(_stale, ranks, units, names, STEPS, waits, deadline_s=900.0 if FULL else 120.0):
        assert found.keys() == {*names}
        assert {name: stale for name, (stale, _) in found.items() if stale} == {}
        assert all(count >= STEPS for _, count in found.values())


def _refused_copies():
    """Return the error of each way of copying while gathers are under way. Then the next step trains as if no copy had
    been tried.
    """
    told = []
    with late_gathers():
        engine = _engine(units=True)
        train_step(engine, 0)
        for name, copies in COPIES.items():
            try:
                copies(engine.module, 0)
            except RuntimeError as error:
                told.append(str(error))
            else:
                told.append(f"{name} was not refused")
        train_step(engine, 1)
        engine.wait()
        want = _of_masters(engine).state_dict()
        told += [name for name, value in engine.module.state_dict().items() if not torch.equal(value, want[name])]
    return told


def test_a_copy_while_gathers_are_under_way_is_refused(run_ranks):
    for told in run_ranks(_refused_copies, 2):
        assert len(told) == len(COPIES)
        assert all("call engine.wait() before" in message for message in told), told


def _read_after_a_load():
    answers = []
    with late_gathers():
        for units in (False, True):
            source, engine = _engine(units), _engine(units)
            train_step(source, 0)
            engine.load_state_dict(source.state_dict())
            if units:
                engine.wait()
            got = {name: value.detach().clone() for name, value in engine.module.named_parameters()}
            want = dict(_of_masters(source).named_parameters())
            answers += [torch.equal(got[name], want[name]) for name in want]
    return answers


def test_a_read_after_a_load_is_of_what_was_loaded(run_ranks):
    for answers in run_ranks(_read_after_a_load, 2):
        assert len(answers) == 48
        assert all(answers)


def _live_apart_from_the_engine():
    """Let a copy and a pickle go on by themselves: they keep no engine alive, await nothing, and train
    under their own.
    """
    with late_gathers() as begun:
        engine = _engine(units=True)
        train_step(engine, 0)
        engine.wait()
        copied = copy.deepcopy(engine.module)
        unpickled = pickle.loads(pickle.dumps(engine.module))
        before = {name: value.clone() for name, value in copied.state_dict().items()}
        train_step(engine, 1)  # gathers are under way now
        for one in (copied, unpickled):
            one.state_dict(), loss_of(one, make_batch(1, 0, 0))
        answers = [any(not gather.done for gather in begun)]
        answers += [torch.equal(value, before[name]) for name, value in copied.state_dict().items()]
        engine.wait()
        module, held = engine.module, [weakref.ref(one) for one in (engine, *(one.master for one in engine.buckets))]
        del engine
        gc.collect()
        answers += [one() is None for one in held]  # although the module and its copies live on
        answers.append(bool(torch.isfinite(loss_of(module, make_batch(2, 0, 0)))))
        second = make_engine(unpickled, AdamW(lr=0.05), BF16, shard="states")
        train_step(second, 2)
        second.wait()
        want = _of_masters(second).state_dict()
        return answers + [torch.equal(value, want[name]) for name, value in unpickled.state_dict().items()]


def test_copies_live_apart_from_the_engine(run_ranks):
    for answers in run_ranks(_live_apart_from_the_engine, 2):
        assert len(answers) > 50
        assert all(answers)
