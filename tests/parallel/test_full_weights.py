"""Full weights and buffers are loaded and returned on any mesh; a copy that differs is named on all of its ranks."""

import pytest
import torch
from torch import nn

from megamix import AdamW, Precision, ShardedEngine, Sharding
from megamix.comm.topology import Topology
from megamix.train.replicas import DamagedMemory, check_replicas
from tests.parallel.layouts import Case, are_equal, assemble, backward, build, states, world_rank


def _weights_through_the_engine(case):
    """Return full weights and this rank's masters, which another engine that is given the weights has, too."""
    (_, source), (_, target) = build(case), build(case)
    backward(case, source, 0)
    source.step()
    weights = source.full_weights()
    target.load_weights(weights)
    check_replicas(target)
    masters, loaded = states(source)["master"], states(target)["master"]
    assert are_equal([one.values for one in masters], [one.values for one in loaded])
    return weights, masters


@pytest.mark.parametrize("case", [Case(dp_size=2, tp_size=2), Case(model="llama", tied=False, tp_size=2)])
def test_full_weights_go_out_and_in_on_any_mesh(run_ranks, case):
    ranks = run_ranks(_weights_through_the_engine, case.world_size, case)
    masters, _ = assemble([owned for _, owned in ranks])
    for weights, _ in ranks:
        assert weights.keys() == masters.keys() | ({"head.weight"} if case.tied else set())
        assert all(torch.equal(weights[name], masters[name]) for name in masters)


class _Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("rows", torch.zeros(2, 3, dtype=torch.bfloat16).T)


def _buffers_through_the_engine():
    """Return full weights of stages that count for themselves. Loaded, they are what there was."""
    stage = world_rank()
    model = nn.ModuleDict({f"stage{stage}": _Counting()})
    sharding = Sharding(topology=Topology.connect(pp=2))
    engine = ShardedEngine(model, AdamW(lr=0.1), Precision(torch.bfloat16), sharding, compile_update=False)
    for buffer in model.buffers():
        buffer.add_(stage + 1)
    weights = engine.full_weights()
    for buffer in model.buffers():
        buffer.zero_()
    engine.load_weights(weights)
    assert all(bool((buffer == stage + 1).all()) for buffer in model.buffers())
    return weights


def test_full_weights_have_the_buffers_of_all_stages(run_ranks):
    first, second = run_ranks(_buffers_through_the_engine, 2)
    leaves = ("inner.weight", "inner.bias", "seen", "rows")
    held = {f"stage{stage}.{leaf}" for stage in range(2) for leaf in leaves}
    assert first.keys() == held | {"stage0.empty"}  # nothing to send: on its own stage alone
    assert second.keys() == held | {"stage1.empty"}
    for name in sorted(held):
        tensor = first[name]
        assert torch.equal(tensor, second[name])
        assert tensor.dtype == {"seen": torch.int64, "rows": torch.bfloat16}.get(name.split(".")[1], torch.float32)
    assert [int(first[f"stage{stage}.seen"]) for stage in range(2)] == [1, 2]
    assert torch.equal(first["stage1.rows"], torch.full((3, 2), 2.0, dtype=torch.bfloat16))


def _damage(case, victim, name):
    _, engine = build(case)
    backward(case, engine, 0)
    engine.step()
    engine.wait()
    if world_rank() == victim:
        for bucket in engine.buckets:
            for slot in bucket.plan.slots:
                if slot.spec.name == name:
                    bucket.params[slot.start] += 1
        if name == "skipped_steps":
            engine.skipped_steps += 1
    try:
        check_replicas(engine)
    except DamagedMemory as error:
        return str(error)
    return ""


def test_a_copy_that_differs_is_named_on_every_rank_of_a_mesh(run_ranks):
    case = Case(dp_size=2, tp_size=2)
    for victim, name in ((3, "norm.weight"), (2, "blocks.0.attention.out.weight")):
        told = run_ranks(_damage, 4, case, victim, name)
        assert told[0] == told[1] == told[2] == told[3]
        assert f"rank {victim}: the half parameter {name}" in told[0]
    told = run_ranks(_damage, 4, case, 2, "skipped_steps")
    assert told == ["memory does not hold what was written: skipped_steps: 0 on ranks 0, 1, 3 and 1 on rank 2"] * 4
