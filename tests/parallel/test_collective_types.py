"""A second opinion on the collectives of tensor and sequence parallelism, without ranks: spmd_types says of each tensor
whether ranks hold the same, parts of a sum or different ones, and whether gradients still wait to be summed. Forwards
fit, and a wrong border is refused.
"""

from unittest import mock

import pytest
import spmd_types as spmd
import spmd_types.checker
import torch
import torch.distributed as dist
from spmd_types import I, P, R, S, V, rules
from torch.testing._internal.distributed.fake_pg import FakeStore

from megamix.comm.topology import Topology
from megamix.config import ParallelismConfig
from megamix.model import wide
from megamix.model.cross_entropy import LinearCrossEntropy
from megamix.parallel import borders
from megamix.parallel.borders import Border
from megamix.parallel.build import build_model
from tests.tools.verify.jobs import make_config

for _function in (wide.SwiGLU, wide.GELU):
    spmd.register_local_autograd_function(_function)


@pytest.fixture
def tp():
    """The group of two tensor-parallel ranks, of which this process alone is there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.group.WORLD
    dist.destroy_process_group()


def _crossing(*, x, there, back):
    """Say what a border does to the ranks' tensors, from what its forward is called."""
    group = dist.group.WORLD
    parts = rules.reinterpret(x, group, src=V, dst=P) if there.__name__.startswith("_sum") else x
    ways = {
        "_same": lambda: rules.convert(x, group, src=I, dst=R),
        "_sum": lambda: rules.all_reduce(parts, group, src=P, dst=I),
        "_gather": lambda: rules.all_gather(x, group, src=S(1), dst=R),
        "_sum_positions": lambda: rules.reduce_scatter(parts, group, src=P, dst=S(1)),
    }
    return ways[there.__name__]()


def _cross_entropy(*, hidden, weight, targets):
    """Each rank has some columns, and all add up the same loss."""
    rules.ignore(targets)
    parts = rules.reinterpret(rules.einsum("tk,vk->", hidden, weight), dist.group.WORLD, src=V, dst=P)
    return rules.all_reduce(parts, dist.group.WORLD, src=P, dst=I)


def _type_of_loss(family, sequence):
    config = make_config("tp2", family=family, dtype="fp32", model={"seq_len": 16}, sequence_parallel=sequence).model
    section, topology = ParallelismConfig(tensor={"size": 2, "sequence_parallel": sequence}), Topology.connect(tp=2)
    model, _ = build_model(config, section, topology, torch.device("cpu"))
    with (
        mock.patch.object(borders.Crossing, "spmd_typecheck", staticmethod(_crossing), create=True),
        mock.patch.object(LinearCrossEntropy, "spmd_typecheck", staticmethod(_cross_entropy), create=True),
        spmd.checker.typecheck(),
    ):
        for name, param in model.named_parameters():
            param.data = torch.zeros(param.shape)
            whole = R if sequence else I  # with divided positions each rank has a part of the gradient
            spmd.assert_type(param, {dist.group.WORLD: V if model.rules[name].divided is not None else whole})
        tokens = torch.zeros(2, 16, dtype=torch.int64)
        inputs = [tokens, tokens.clone(), torch.arange(16)]
        for each in inputs:
            spmd.assert_type(each, {dist.group.WORLD: I})
        for table in model.buffers():
            spmd.assert_type(table, {dist.group.WORLD: R})
        return spmd.get_local_type(model(*inputs))


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_the_borders_of_divided_layers_fit(tp, family, sequence):
    assert [*_type_of_loss(family, sequence).values()] == [I]


@pytest.mark.parametrize(
    ("border", "wrong", "sequence"),
    [
        ("leave", lambda border, x: x, False),  # outputs are not summed
        ("enter", lambda border, x: x, False),  # gradients of inputs are not summed
        ("leave", lambda border, x: border._cross(borders.Crossing, x, border._sum, borders._same), True),
        ("enter", lambda border, x: border._cross(borders.Crossing, x, borders._same, border._sum), True),
    ],
)
def test_a_wrong_border_is_refused(tp, border, wrong, sequence):
    with mock.patch.object(Border, border, wrong), pytest.raises(spmd.types.SpmdTypeError):
        _type_of_loss("llama", sequence)
