"""Muon under tensor parallelism assembles a divided matrix from all ranks' blocks and moves it as the undivided one,
bit for bit; blocks that cannot be assembled are refused.
"""

import pytest
import torch
from torch import nn

from megamix import Muon, Sharding
from megamix.comm.topology import Topology
from megamix.mixed_precision.optim.muon import MOMENTUM, orthogonalised
from megamix.mixed_precision.settings import Placement
from megamix.mixed_precision.update_slice import MASTER
from tests.builders import make_engine
from tests.parallel import layouts
from tests.parallel.layouts import Case, assemble

STEPS = 2


def _train(case, optimizer):
    """Return this rank's part of (masters and momenta before the step, the gradient, masters and momenta after it) of
    each step.
    """
    _, engine = layouts.build(case, optimizer)
    seen = []
    for step in range(STEPS):
        before = layouts.states(engine)
        layouts.backward(case, engine, step)
        engine.step()
        seen.append((before, layouts.gradients(engine)["gradient"], layouts.states(engine)))
    return seen


def _moved(optimizer, grad, master, momentum):
    """Return the new master and momentum of one whole matrix."""
    momentum = torch.lerp(momentum, grad, 1 - optimizer.momentum)
    ahead = torch.lerp(grad, momentum, optimizer.momentum).to(optimizer.ns_dtype)
    direction = orthogonalised(ahead, optimizer).float() * optimizer.lr_scale(*grad.shape)
    lr = torch.tensor(optimizer.lr_table()[0])
    return master - lr * optimizer.weight_decay * master - lr * direction, momentum


# Without clipping, with a power of two of micro-batches, a gradient without its scale is exact.
@pytest.mark.also_wide
@pytest.mark.parametrize(
    ("dp_size", "tp_size", "model", "ns_dtype"),
    [(1, 2, "llama", torch.bfloat16), (2, 2, "gpt", torch.float32), (1, 4, "gpt", torch.bfloat16)],
)
def test_a_divided_matrix_moves_as_the_whole_one(run_ranks, dp_size, tp_size, model, ns_dtype):
    case = Case(model=model, tied=False, dp_size=dp_size, tp_size=tp_size, dtype=torch.bfloat16, clip_grad=0.0)
    optimizer = Muon(lr=0.02, ns_dtype=ns_dtype)
    ranks = run_ranks(_train, case.world_size, case, optimizer)
    divided = 0
    for step, there in enumerate(zip(*ranks, strict=True)):
        befores, grads_of_ranks, afters = zip(*there, strict=True)
        grads, shared = assemble(grads_of_ranks)
        assert not shared
        before, after = (
            {state: assemble([rank[state] for rank in states])[0] for state in (MASTER, MOMENTUM)}
            for states in (befores, afters)
        )
        assert before[MOMENTUM]
        for name, momentum in before[MOMENTUM].items():
            got = after[MASTER][name], after[MOMENTUM][name]
            want = _moved(optimizer, grads[name], before[MASTER][name], momentum)
            assert all(map(torch.equal, got, want)), f"{name} in step {step}"
            blocks = (one.spec for rank in grads_of_ranks for one in rank if one.spec.name == name)
            divided += any(spec.shape != spec.full_shape for spec in blocks)
    assert divided == STEPS * 2 * (7 if model == "llama" else 6)  # matrices of two blocks


def _engine(dim, adamw=()):
    """Return the engine of the second of two ranks that divide a parameter of three dims in this one."""
    shape, offset = [4, 8, 6], [0, 0, 0]
    shape[dim] //= 2
    offset[dim] = 2
    model = nn.ParameterDict({"experts": torch.zeros(shape)})
    sharding = Sharding(placements={"experts": Placement((4, 8, 6), tuple(offset), Topology().owners)})
    return make_engine(model, Muon(lr=0.1, adamw=adamw), sharding=sharding)


@pytest.mark.parametrize(
    ("dim", "named"),
    [(1, r"divide its \[4, 8, 6\] into blocks of \[4, 4, 6\]"), (2, "have 24 of 48 elements; let AdamW update it")],
)
def test_blocks_that_cannot_be_put_together_are_refused(dim, named):
    with pytest.raises(ValueError, match=named):
        _engine(dim)
    _engine(dim, adamw=["experts"])  # as the message asks
