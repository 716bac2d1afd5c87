"""A `Tally` moves once a step by the counts of the whole global batch, on every layout and compiled, without a host
read. Skipped steps, probes, discarded steps, evaluations and what backward repeats leave no count. Its value stays
FP32, is in weights and checkpoints, and keeps no engine alive; `Counts` alone have no value.
"""

import copy
import pickle
import weakref
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megamix import Checkpoints, HeadroomLossScale, Precision, StaticLossScale, Tally
from megamix.base.tally import Counts
from megamix.comm.topology import Topology
from tests.base.choosers import PLACES, choosers, counted_up
from tests.builders import loss_of, make_batch, make_engine
from tests.mixed_precision.spoilers import SPOILERS
from tests.mixed_precision.test_no_host_read import no_host_read

FP16 = Precision(torch.float16, loss_scale=StaticLossScale(8.0))
NAMES = ["blocks.0.chosen", "blocks.1.chosen"]


def _watch(model):
    """Return the counts of the model's forwards from now on, by tally, apart from the engine."""
    seen = [torch.zeros(PLACES) for _ in NAMES]

    def note(counts, router, args, logits):
        counts += F.one_hot(logits.float().argmax(-1), PLACES).flatten(0, -2).sum(0)

    for counts, block in zip(seen, model.blocks, strict=True):
        block.router.register_forward_hook(partial(note, counts))
    return seen


def _values(engine):
    return [engine.module.get_buffer(f"{name}.value").tolist() for name in NAMES]


def _sums(result):
    return [float(counts.sum()) for counts in result.tallied.values()]


def _backward(engine, step, rank=0, micro_batch=0, times=1.0):
    engine.backward(loss_of(engine, make_batch(step, rank, micro_batch)) * times)


def test_it_moves_once_a_step_by_the_counts_of_all_micro_batches():
    model = choosers()
    engine, seen = make_engine(model, grad_accum_steps=2), _watch(model)
    told = torch.zeros(len(NAMES), PLACES)
    for step in range(3):
        before = _values(engine)
        for micro_batch in range(2):
            _backward(engine, step, micro_batch)
            assert _values(engine) == before
        with no_host_read():
            model.blocks[0].chosen.add(torch.zeros(PLACES, dtype=torch.float16))
            result = engine.step()
        assert list(result.tallied) == NAMES
        told += torch.stack([*result.tallied.values()])
        assert _values(engine) == told.tolist() == [counts.tolist() for counts in seen]
    assert told.sum() == 2 * 3 * 2 * 18


def _evaluated(engine, forward):
    engine.module.eval()
    forward()
    engine.module.train()


def _generated(engine, forward):
    with torch.no_grad():
        forward()


@pytest.mark.parametrize("call", [*SPOILERS, _evaluated, _generated])
def test_what_is_no_part_of_a_step_leaves_no_count(call):
    def told(disturbed):
        scale = HeadroomLossScale(window=4)
        engine = make_engine(choosers(), precision=Precision(torch.float16, loss_scale=scale), grad_accum_steps=2)
        forward = partial(loss_of, engine, make_batch(9, 0, 0))
        if disturbed:
            call(engine, forward)
        for number in range(2):
            _backward(engine, 0, number)
            if disturbed and number == 0 and call not in SPOILERS:
                call(engine, forward)
        return _sums(engine.step()), _values(engine)

    assert told(True) == told(False)
    assert told(True)[0] == [36.0, 36.0]


def test_a_skipped_step_leaves_every_bit_though_a_rule_may_write_what_it_gets_and_its_retry_counts_once():
    def in_place(value, counts):
        return value.add_(counts.mul_(2).add_(1)).mul_(factor)

    model, factor = choosers(), 1.0
    for block in model.blocks:
        block.chosen.rule = in_place
        block.chosen.value.fill_(-0.0)
    engine = make_engine(model, precision=FP16)
    factor = float("nan")
    _backward(engine, 0, times=float("inf"))
    result = engine.step()
    assert result.found_inf
    assert _sums(result) == [18.0, 18.0]
    assert all(value.equal(torch.zeros(PLACES)) and value.signbit().all() for value in model.buffers())
    factor = 1.0
    _backward(engine, 0)
    result = engine.step()
    assert not result.found_inf
    assert _sums(result) == [18.0, 18.0]
    assert _values(engine) == [(2 * counts + 1).tolist() for counts in result.tallied.values()]


@pytest.mark.parametrize("shard", ["states", "gradients", "parameters"])
def test_what_backward_computes_again_counts_once(shard):
    engine = make_engine(choosers(recompute=True), shard=shard)
    _backward(engine, 0)
    assert _sums(engine.step()) == [18.0, 18.0]


def test_each_engine_moves_its_own():
    engines, models = [make_engine(choosers()) for _ in range(2)], [choosers() for _ in range(2)]
    losses = [loss_of(engine, make_batch(number, 0, 0)) for number, engine in enumerate(engines)]
    engines[1].module.eval()
    loss_of(engines[1].module, make_batch(3, 0, 0))  # past its engine, while the other one trains
    engines[1].module.train()
    wanted = []
    for number, model in enumerate(models):
        seen = _watch(model)
        loss_of(model, make_batch(number, 0, 0)).backward()
        wanted.append([counts.tolist() for counts in seen])
    for engine, loss in zip(engines, losses, strict=True):
        engine.backward(loss)
    assert [_counts(engine.step()) for engine in engines] == wanted
    assert [_values(engine) for engine in engines] == wanted
    assert not any(value.any() for model in models for value in model.buffers())


def _counts(result):
    return [result.tallied[name].tolist() for name in NAMES]


def test_compiled_blocks_count_in_one_graph():
    backend = mock.Mock(side_effect=lambda graph, inputs: graph)

    def told(compiled):
        torch._dynamo.reset()
        model = choosers(recompute=True)
        for block in model.blocks if compiled else ():
            block.compile(dynamic=False, fullgraph=True, backend=backend)
        engine = make_engine(model, grad_accum_steps=2)
        values = []
        for step in range(3):
            for micro_batch in range(2):
                _backward(engine, step, micro_batch)
            engine.step()
            _evaluated(engine, partial(loss_of, engine, make_batch(9, 0, 0)))
            values.append(_values(engine))
        return values

    assert told(True) == told(False)
    assert backend.call_count == 3  # of a training forward, of its repetition in backward, and of an evaluation


def _on_ranks(axis, shard):
    topology = Topology.connect() if axis == "dp" else Topology.connect(**{axis: 2})
    model = choosers()
    engine = make_engine(model, precision=FP16, shard=shard, topology=topology, grad_accum_steps=2)
    reader = topology.readers.rank
    told = []
    for step in range(3):
        overflows = step == 1 and topology.world.rank == topology.world.size - 1
        for micro_batch in range(2):
            _backward(engine, step, reader, micro_batch, times=float("inf") if overflows else 1.0)
        result = engine.step()
        told.append((bool(result.found_inf), _counts(result), _values(engine)))
    return told


def _summed(ranks):
    """Return the counts of each step by models with the ranks' first weights, of the first step alone."""
    model = choosers().half()
    seen = _watch(model)
    for reader in range(ranks):
        for micro_batch in range(2):
            loss_of(model, make_batch(0, reader, micro_batch))
    return [counts.tolist() for counts in seen]


@pytest.mark.parametrize(
    ("ranks", "axis", "readers"), [(2, "dp", 2), (2, "cp", 2), (2, "replicas", 2), (2, "tp", 1), (4, "cp", 4)]
)
@pytest.mark.parametrize("shard", ["states", "parameters"])
def test_ranks_count_tokens_that_they_share_once_and_others_together(run_ranks, ranks, axis, readers, shard):
    first, *others = run_ranks(_on_ranks, ranks, axis, shard)
    assert others == [first] * (ranks - 1)
    skipped, *told = zip(*first, strict=True)
    assert skipped == (False, True, False)
    tallied, values = map(torch.tensor, told)
    assert tallied[0].tolist() == _summed(readers)
    assert torch.equal(values[0], tallied[0])
    assert torch.equal(values[1], values[0])
    assert torch.equal(values[2], tallied[0] + tallied[2])


def _other_tallies():
    model = choosers()
    if torch.distributed.get_rank() == 1:
        model.blocks[1].chosen = Tally(PLACES + 1, counted_up)
    with pytest.raises(ValueError, match="hold different models"):
        make_engine(model)


def test_ranks_with_other_tallies_are_refused(run_ranks):
    run_ranks(_other_tallies, 2)


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
        loss_of(other, make_batch(0, 0, 0))
    _backward(engine, 0)
    assert _sums(engine.step()) == [18.0, 18.0]
    held = weakref.ref(engine)
    del engine
    assert held() is None
    model.blocks[0].chosen.add(torch.ones(PLACES))  # no engine: no effect


def _saved(folder):
    engine = make_engine(choosers(), precision=FP16)
    for step in range(2):
        _backward(engine, step, engine.topology.dp.rank)
        engine.step()
    _backward(engine, 2, engine.topology.dp.rank)
    engine.discard_step()
    Checkpoints(engine, folder).save({})
    return _values(engine)


def _loaded(folder):
    engine = make_engine(choosers(), precision=FP16)
    assert Checkpoints(engine, folder).load() == {}
    return _values(engine)


def test_checkpoints_hold_it_on_any_number_of_ranks(run_ranks, tmp_path):
    first, second = run_ranks(_saved, 2, tmp_path)
    assert first == second
    assert sum(map(sum, first)) == 2 * 2 * 2 * 18
    assert [*run_ranks(_loaded, 3, tmp_path), _loaded(tmp_path)] == [first] * 4


def test_counts_alone_are_told_and_leave_nothing_in_the_weights():
    model = choosers()
    model.blocks[1].chosen = Counts(PLACES)
    engine, seen = make_engine(model, precision=FP16), _watch(model)
    for overflows in (False, True):
        _backward(engine, 0, times=float("inf") if overflows else 1.0)
        assert _counts(engine.step()) == [counts.tolist() for counts in seen]
        for counts in seen:
            counts.zero_()
    assert [name for name in engine.full_weights() if "chosen" in name] == ["blocks.0.chosen.value"]
    assert not list(model.blocks[1].chosen.buffers())


def test_counts_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"Tally.add: counts must be of shape \(5,\), got \(1, 5\)"):
        Tally(PLACES, counted_up).add(torch.ones(1, PLACES))


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        (lambda value, counts: value.sum(), r"torch.float32 of shape \(\)"),
        (lambda value, counts: value.double(), r"torch.float64 of shape \(5,\)"),
        (lambda value, counts: None, "None; return the next value"),
    ],
)
def test_a_rule_whose_result_is_no_next_value_is_refused(rule, told):
    model = choosers()
    model.blocks[1].chosen.rule = rule
    with pytest.raises(ValueError, match=rf"tally blocks.1.chosen must return torch.float32 of .*\(5,\), got {told}"):
        make_engine(model, precision=FP16)


def test_a_value_of_another_dtype_is_refused():
    model = choosers()
    model.load_state_dict({name: value.half() for name, value in model.state_dict().items()}, assign=True)
    with pytest.raises(ValueError, match=r"the value of the tally blocks.0.chosen is torch.float16, and must be"):
        make_engine(model, precision=FP16)
