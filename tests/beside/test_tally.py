"""A `Tally` moves once a step by the counts of the whole global batch, on every layout and compiled, without a host
read. Skipped steps, probes, discarded steps, evaluations and what backward repeats leave no count. Its value stays
FP32, is in weights and checkpoints, and keeps no engine alive; `Counts` alone have no value.
"""

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megamix import HeadroomLossScale, Precision, ShardedEngine, Sharding, StaticLossScale, Tally
from megamix.beside.tally import Counts
from megamix.checkpoint.load import load, newest_checkpoint
from megamix.checkpoint.manifest import RunRecord
from megamix.checkpoint.save import save
from megamix.checkpoint.snapshot import take_snapshot
from megamix.comm.topology import Topology
from tests.beside.choosers import PLACES, Chooser, choosers, counted_up, loss_of, tokens_of
from tests.builders import make_engine
from tests.checkpoint.state import all_or_none_of
from tests.mixed_precision.test_no_host_read import no_host_read

FP16 = Precision(torch.float16, loss_scale=StaticLossScale(8.0))
NAMES = ["blocks.0.chosen", "blocks.1.chosen"]


def _watch(model):
    """Return the counts of the model's forwards from now on, by tally, apart from the engine."""
    seen = {name: torch.zeros(PLACES) for name in NAMES}

    def note(name):
        def hook(router, args, logits):
            seen[name] += F.one_hot(logits.float().argmax(-1), PLACES).flatten(0, -2).sum(0)

        return hook

    for name, block in zip(NAMES, model.blocks, strict=True):
        assert isinstance(block, Chooser)
        block.router.register_forward_hook(note(name))
    return seen


def _values(engine):
    return [engine.module.get_buffer(f"{name}.value").tolist() for name in NAMES]


def _backward(engine, *place, times=1.0):
    engine.backward(loss_of(engine, tokens_of(*place)) * times)


def test_it_moves_once_a_step_by_the_counts_of_all_micro_batches():
    model = choosers()
    engine, seen = make_engine(model, grad_accum_steps=2), _watch(model)
    total = {name: torch.zeros(PLACES) for name in NAMES}
    for step in range(3):
        before = _values(engine)
        for micro_batch in range(2):
            _backward(engine, step, micro_batch)
            assert _values(engine) == before
        with no_host_read():
            result = engine.step()
        assert list(result.tallied) == NAMES
        for name in NAMES:
            assert torch.equal(result.tallied[name], seen[name])
            total[name] += seen[name]
            seen[name].zero_()
        assert _values(engine) == [total[name].tolist() for name in NAMES]
    assert sum(map(sum, _values(engine))) == 2 * 3 * 2 * 3 * 8


def test_adding_reads_nothing_on_the_host():
    engine = make_engine(choosers())
    with no_host_read():
        engine.module.blocks[0].chosen.add(torch.arange(PLACES, dtype=torch.float16))
    _backward(engine, 0)
    assert float(engine.step().tallied[NAMES[0]].sum()) == 24 + 10


def _discard(engine):
    _backward(engine, 9)
    engine.discard_step()


def _probe(engine):
    for number in range(engine.grad_accum_steps):
        _backward(engine, 9, number)
    engine.probe_loss_scale()


def _fail_in_backward(engine):
    def fail(grad):
        raise ValueError("planted")

    def hook(head, args, out):
        out.register_hook(fail)

    handle = engine.module.head.register_forward_hook(hook)
    with pytest.raises(ValueError, match="planted"):
        _backward(engine, 9)
    handle.remove()


def _fail_in_forward(engine):
    def fail(*_):
        raise ValueError("planted")

    handle = engine.module.head.register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="planted"):
        loss_of(engine, tokens_of(9))
    handle.remove()
    engine.discard_step()


def _evaluate(engine):
    engine.module.eval()
    loss_of(engine, tokens_of(9))
    engine.module.train()


@torch.no_grad()
def _generate(engine):
    loss_of(engine, tokens_of(9))


@pytest.mark.parametrize("call", [_discard, _probe, _fail_in_backward, _fail_in_forward, _evaluate, _generate])
def test_what_is_no_part_of_a_step_leaves_no_count(call):
    def told(disturbed):
        scale = HeadroomLossScale(window=4)
        engine = make_engine(choosers(), precision=Precision(torch.float16, loss_scale=scale), grad_accum_steps=2)
        if disturbed:
            call(engine)
        for number in range(2):
            _backward(engine, 0, number)
            if disturbed and number == 0 and call in (_evaluate, _generate):
                call(engine)
        return [float(counts.sum()) for counts in engine.step().tallied.values()], _values(engine)

    assert told(True) == told(False)
    assert told(True)[0] == [48.0, 48.0]


def test_a_skipped_step_leaves_every_bit_and_its_retry_counts_once():
    def towards_nan(value, counts):
        return torch.where(counts > 0, torch.nan, value) if overflows else counted_up(value, counts)

    overflows = False
    model = choosers()
    for block in model.blocks:
        block.chosen.rule = towards_nan
        block.chosen.value.fill_(-0.0)
    engine = make_engine(model, precision=FP16)
    overflows = True
    _backward(engine, 0, times=float("inf"))
    result = engine.step()
    assert result.found_inf
    assert [float(counts.sum()) for counts in result.tallied.values()] == [24.0, 24.0]
    assert all(value.equal(torch.zeros(PLACES)) and value.signbit().all() for value in model.buffers())
    overflows = False
    _backward(engine, 0)
    result = engine.step()
    assert not result.found_inf
    assert _values(engine) == [counts.tolist() for counts in result.tallied.values()]


def test_a_rule_may_write_what_it_gets():
    def in_place(value, counts):
        return value.add_(counts.mul_(2).add_(1))

    model = choosers()
    for block in model.blocks:
        block.chosen.rule = in_place
    engine = make_engine(model, precision=FP16)
    assert not any(value.any() for value in model.buffers())
    _backward(engine, 0, times=float("inf"))
    assert engine.step().found_inf
    assert not any(value.any() for value in model.buffers())
    _backward(engine, 0)
    assert [float(counts.sum()) for counts in engine.step().tallied.values()] == [24.0, 24.0]


@pytest.mark.parametrize("shard", ["states", "gradients", "parameters"])
def test_what_backward_computes_again_counts_once(shard):
    def told(recompute):
        engine = make_engine(choosers(recompute=recompute), shard=shard)
        for step in range(2):
            _backward(engine, step)
            engine.step()
        return _values(engine)

    assert told(True) == told(False)


def test_each_engine_moves_its_own():
    engines = [make_engine(choosers()) for _ in range(2)]
    alone = choosers()
    losses = [loss_of(engine, tokens_of(number)) for number, engine in enumerate(engines)]
    loss_of(alone, tokens_of(2)).backward()
    engines[1].module.eval()
    loss_of(engines[1].module, tokens_of(3))  # past its engine, while the other one trains
    engines[1].module.train()
    wanted = []
    for number in range(2):
        model = choosers()
        seen = _watch(model)
        loss_of(model, tokens_of(number))
        wanted.append([seen[name].tolist() for name in NAMES])
    for engine, loss in zip(engines, losses, strict=True):
        engine.backward(loss)
    assert [_counts(engine.step().tallied) for engine in engines] == wanted
    assert [_values(engine) for engine in engines] == wanted
    assert not any(value.any() for value in alone.buffers())


def _counts(tallied):
    return [tallied[name].tolist() for name in NAMES]


@pytest.mark.uncounted
def test_compiled_blocks_count_in_one_graph():
    graphs = []

    def note(graph, inputs):
        graphs.append(graph)
        return graph

    def told(compiled):
        torch._dynamo.reset()
        model = choosers(recompute=True)
        for block in model.blocks if compiled else ():
            block.compile(dynamic=False, fullgraph=True, backend=note)
        engine = make_engine(model, grad_accum_steps=2)
        values = []
        for step in range(3):
            for micro_batch in range(2):
                _backward(engine, step, micro_batch)
            engine.step()
            _evaluate(engine)
            values.append(_values(engine))
        return values

    assert told(True) == told(False)
    assert len(graphs) == 3  # of a training forward, of its repetition in backward, and of an evaluation


def _on_ranks(axis, shard):
    topology = Topology.connect() if axis == "dp" else Topology.connect(**{axis: 2})
    model = choosers()
    engine = make_engine(model, precision=FP16, shard=shard, topology=topology, grad_accum_steps=2)
    reader = topology.readers.rank
    told = {"tallied": [], "values": [], "skipped": []}
    for step in range(3):
        overflows = step == 1 and topology.world.rank == topology.world.size - 1
        for micro_batch in range(2):
            _backward(engine, step, reader, micro_batch, times=float("inf") if overflows else 1.0)
        result = engine.step()
        told["tallied"].append(_counts(result.tallied))
        told["values"].append(_values(engine))
        told["skipped"].append(bool(result.found_inf))
    return told


def _summed(ranks):
    """Return the counts of each step by models with the ranks' first weights, of the first step alone."""
    model = choosers().half()
    seen = _watch(model)
    for reader in range(ranks):
        for micro_batch in range(2):
            loss_of(model, tokens_of(0, reader, micro_batch))
    return [seen[name].tolist() for name in NAMES]


@pytest.mark.parametrize("axis", ["dp", "cp", "replicas"])
@pytest.mark.parametrize("shard", ["states", "parameters"])
def test_ranks_with_other_tokens_count_together(run_ranks, axis, shard):
    first, second = run_ranks(_on_ranks, 2, axis, shard)
    assert first == second
    assert first["skipped"] == [False, True, False]
    tallied, values = (torch.tensor(first[kind]) for kind in ("tallied", "values"))
    assert tallied[0].tolist() == _summed(2)
    assert torch.equal(values[0], tallied[0])
    assert torch.equal(values[1], values[0])
    assert torch.equal(values[2], tallied[0] + tallied[2])
    assert tallied.sum(2).unique().tolist() == [2 * 48.0]


def test_tensor_parallel_ranks_see_the_same_tokens_and_count_them_once(run_ranks):
    first, second = run_ranks(_on_ranks, 2, "tp", "states")
    assert first == second
    assert first["tallied"][0] == _summed(1)


def test_four_ranks_that_read_and_divide_count_together(run_ranks):
    all_told = run_ranks(_on_ranks, 4, "cp", "states")
    assert all(told == all_told[0] for told in all_told)
    assert all_told[0]["tallied"][0] == _summed(4)


def _other_tallies():
    model = choosers()
    if torch.distributed.get_rank() == 1:
        model.blocks[1].chosen = Tally(PLACES + 1, counted_up)
    try:
        make_engine(model)
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_with_other_tallies_are_refused(run_ranks):
    assert all("hold different models" in told for told in run_ranks(_other_tallies, 2))


def test_its_value_stays_fp32_and_is_zero_where_it_had_none():
    tally = Tally(3, counted_up)
    values = torch.tensor([1 / 3, 2.0**-20, 40_000_001.0])
    tally.value.copy_(values)
    for cast in (nn.Module.half, nn.Module.bfloat16, nn.Module.double):
        assert torch.equal(cast(tally).value, values)
        assert tally.value.dtype == torch.float32
    with torch.device("meta"):
        empty = nn.Sequential(Tally(3, counted_up))
    assert empty[0].value.is_meta
    assert torch.equal(empty.half().to_empty(device="cpu")[0].value, torch.zeros(3))
    assert [*empty.state_dict()] == ["0.value"]


def test_a_copy_and_a_pickle_count_nothing_and_an_engine_goes_when_it_is_dropped():
    model = choosers()
    engine = make_engine(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        loss_of(other, tokens_of(0))
    _backward(engine, 0)
    assert [float(counts.sum()) for counts in engine.step().tallied.values()] == [24.0, 24.0]
    bucket = weakref.ref(engine.buckets[0])
    del engine
    gc.collect()
    assert bucket() is None
    model.blocks[0].chosen.add(torch.ones(PLACES))  # no engine: no effect


def _engine():
    return make_engine(choosers(), precision=FP16)


def _saved(folder):
    engine = _engine()
    for step in range(2):
        _backward(engine, step, engine.topology.dp.rank)
        engine.step()
    _backward(engine, 2, engine.topology.dp.rank)
    engine.discard_step()
    save(folder, take_snapshot(engine, RunRecord()), all_or_none_of(engine))
    return _values(engine)


def _loaded(folder):
    engine = _engine()
    checkpoint = newest_checkpoint(folder, all_or_none_of(engine))
    assert checkpoint is not None
    load(checkpoint, engine, all_or_none_of(engine))
    return _values(engine)


def test_checkpoints_hold_it_on_any_number_of_ranks(run_ranks, tmp_path):
    first, second = run_ranks(_saved, 2, tmp_path)
    assert first == second
    assert sum(map(sum, first)) == 2 * 2 * 2 * 24
    assert [*run_ranks(_loaded, 3, tmp_path), _loaded(tmp_path)] == [first] * 4


def test_full_weights_hold_it_and_load_weights_sets_it():
    engine, other = _engine(), _engine()
    _backward(engine, 0)
    engine.step()
    weights = engine.full_weights()
    assert [weights[f"{name}.value"].tolist() for name in NAMES] == _values(engine)
    other.load_weights(weights)
    assert _values(other) == _values(engine)
    for each in (engine, other):
        _backward(each, 1)
        each.step()
    assert _values(other) == _values(engine)


def test_counts_alone_are_told_and_leave_nothing_in_the_weights():
    model = choosers()
    model.blocks[1].chosen = Counts(PLACES)
    engine, seen = make_engine(model, precision=FP16), _watch(model)
    for overflows in (False, True):
        _backward(engine, 0, times=float("inf") if overflows else 1.0)
        assert _counts(engine.step().tallied) == [seen[name].tolist() for name in NAMES]
        for each in seen.values():
            each.zero_()
    assert [name for name in engine.full_weights() if "chosen" in name] == ["blocks.0.chosen.value"]
    assert not list(model.blocks[1].chosen.buffers())


def test_counts_of_another_shape_are_refused():
    for counts in (torch.ones(()), torch.ones(PLACES + 1), torch.ones(1, PLACES)):
        with pytest.raises(ValueError, match=r"Tally.add: counts must be of shape \(5,\), got"):
            Tally(PLACES, counted_up).add(counts)


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        (lambda value, counts: value.sum(), r"float32 of shape \(5,\), got torch.float32 of shape \(\)"),
        (lambda value, counts: value.double(), r"float32 of shape \(5,\), got torch.float64 of shape \(5,\)"),
        (lambda value, counts: None, r"float32 of shape \(5,\), got None; return the next value"),
    ],
)
def test_a_rule_whose_result_is_no_next_value_is_refused(rule, told):
    model = choosers()
    model.blocks[1].chosen.rule = rule
    with pytest.raises(ValueError, match=rf"the rule of the tally blocks.1.chosen must return torch.{told}"):
        ShardedEngine(model, make_engine().optimizer, FP16, Sharding())


def test_a_value_of_another_dtype_is_refused():
    model = choosers()
    model.load_state_dict({name: value.half() for name, value in model.state_dict().items()}, assign=True)
    with pytest.raises(ValueError, match=r"the value of the tally blocks.0.chosen is torch.float16, and must be"):
        make_engine(model, precision=FP16)
