"""A value that a forward or loss records counts once, compiled or recomputed, without a host read, and for the engine
that runs the forward. Values of evaluations, probes, discarded steps and traces do not count. Each value is combined
over ranks by its `reduce`; different names on ranks are an error.
"""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from megamix import HeadroomLossScale, Precision, record
from megamix.comm.topology import Topology
from megamix.log.recorded import FromRank, combine, gather_recorded
from tests.builders import loss_of, make_batch, make_engine, make_model
from tests.mixed_precision.test_no_host_read import no_host_read


def _record_all(name, value):
    for reduce in ("mean", "sum", "max", "min"):
        record(f"{name}/{reduce}", value, reduce)


def record_output(module, args, out):
    _record_all("out", out.abs().amax())


def train(engines, losses):
    """Return what each engine has recorded of a step."""
    for engine, loss in zip(engines, losses, strict=True):
        engine.backward(loss)
    return [_values(engine.step()) for engine in engines]


def _values(result):
    return {name: float(value) for name, value in result.recorded.values().items()}


def _expected(name, values):
    numbers = torch.tensor(values, dtype=torch.float32)
    by_reduce = {"mean": numbers.mean(), "sum": numbers.sum(), "max": numbers.amax(), "min": numbers.amin()}
    return {f"{name}/{reduce}": float(value) for reduce, value in by_reduce.items()}


def test_values_of_all_calls_and_micro_batches_of_a_step_are_combined_as_they_say():
    model, seen = make_model(), []
    engine = make_engine(model, grad_accum_steps=2)
    for block in model.blocks:
        block.register_forward_hook(record_output)
        block.register_forward_hook(lambda module, args, out: seen.append(float(out.detach().abs().amax())))
    for step in range(3):
        seen.clear()
        _record_all("between", torch.tensor(step, dtype=torch.float64))
        with no_host_read():
            record("read", torch.ones((), dtype=torch.float16), "max")
        for micro_batch in range(2):
            loss = loss_of(engine, make_batch(step, 0, micro_batch))
            record("loss", loss)
            engine.backward(loss)
        with no_host_read():
            result = engine.step()
        values = _values(result)
        assert values.pop("loss") == pytest.approx(float(result.loss))
        assert values.pop("read") == 1.0
        assert values == pytest.approx(_expected("out", seen) | _expected("between", [step]))
        assert len(seen) == 6
        assert float(result.recorded.num_values) == 24 + 4 + 2 + 1


def test_what_is_no_part_of_a_step_does_not_count():
    record("alone", torch.ones(()))  # no engine: no effect
    engine = make_engine(precision=Precision(torch.float16, loss_scale=HeadroomLossScale(window=4)))

    def forward(value):
        record("value", torch.tensor(value), "sum")
        return loss_of(engine, make_batch(0, 0, 0))

    engine.backward(forward(1.0))
    engine.probe_loss_scale()
    engine.backward(forward(10.0))
    engine.discard_step()
    engine.module.eval()
    with torch.no_grad():
        forward(100.0)
    engine.module.train()
    assert train([engine], [forward(1000.0)]) == [{"value": 1000.0}]
    engine.backward(loss_of(engine, make_batch(0, 0, 0)))
    result = engine.step()
    assert not result.recorded.num_values
    assert gather_recorded(result.recorded, engine.topology, engine.world) == {}


def test_two_live_engines_report_each_their_own_however_their_models_are_called():
    models = [make_model() for _ in range(2)]
    engines = [make_engine(model) for model in models]
    for number, model in enumerate(models):
        model.register_forward_hook(lambda module, args, out, number=number: record(f"of/{number}", torch.ones(())))
    for step in range(2):
        losses = [loss_of(model, make_batch(step, 0, 0)) for model in models]  # the modules, not the engines
        assert train(engines, losses) == [{"of/0": 1.0}, {"of/1": 1.0}]


def test_what_backward_computes_again_is_told_to_no_other_engine():
    models = [make_model(recompute=True) for _ in range(2)]
    engines = [make_engine(model) for model in models]
    for model in models:
        for block in model.blocks:  # its parts are called again
            block.up.register_forward_hook(lambda module, args, out: record("calls", torch.ones(()), "sum"))
    losses = [loss_of(engine, make_batch(0, 0, 0)) for engine in engines]
    assert train(engines, losses) == [{"calls": len(models[0].blocks)}] * 2


@pytest.mark.parametrize("device", ["meta", "fake"])
def test_a_trace_beside_a_live_engine_reports_to_nobody(device):
    engine = make_engine()
    record("rows", torch.ones(()))
    with FakeTensorMode() if device == "fake" else torch.device("meta"):
        record("rows", torch.ones(()))
        record("traced", torch.ones(()))
    assert train([engine], [loss_of(engine, make_batch(0, 0, 0))]) == [{"rows": 1.0}]


def test_compiled_blocks_record_in_a_graph_that_new_names_do_not_change():
    graphs = []

    def note(graph, inputs):
        graphs.append(graph)
        return graph

    def recorded(compiled):
        torch._dynamo.reset()
        model = make_model(recompute=True)
        for block in model.blocks:
            block.register_forward_hook(record_output)
            if compiled:
                block.compile(dynamic=False, backend=note)
        engine = make_engine(model, grad_accum_steps=2)
        values = []
        for step in range(5):
            record(f"another/{step}", torch.ones(()))
            for micro_batch in range(2):
                engine.backward(loss_of(engine, make_batch(step, 0, micro_batch)))
            values.append(_values(engine.step()))
        return values

    for plain, compiled in zip(recorded(False), recorded(True), strict=True):
        assert plain == pytest.approx(compiled, nan_ok=True)
    # One graph of the block; of its hook one that makes the tensors and one that goes on with them; and backward's.
    assert len(graphs) <= 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("loss", torch.ones(2, 3)), r"'loss'\): must be of shape \(\), got \(2, 3\); pass its mean"),
        (("a b", torch.ones(())), r"'a b'\): a name is letters, digits"),
        (("/a", torch.ones(())), r"'/a'\): a name is letters, digits"),
        (("x", torch.ones(()), "median"), r"'x'\): reduce must be one of mean, sum, max, min, got"),
        (("good", torch.ones(()), "max"), r"'good'\): reduce was 'mean' before, got 'max'; use anot"),
    ],
)
def test_what_cannot_be_recorded_is_refused_by_name(arguments, message):
    engine = make_engine()
    record("good", torch.ones(()))
    with pytest.raises(ValueError, match=rf"record\({message}"):
        record(*arguments)
    engine.discard_step()


def _on_ranks(others):
    rank = dist.get_rank()
    engine = make_engine(grad_accum_steps=2)
    for micro_batch in range(2):
        _record_all("rank", torch.tensor(10.0 * rank + micro_batch))
        if others:
            record(f"of/{rank}", torch.ones(()))
        engine.backward(loss_of(engine, make_batch(0, rank, micro_batch)))
    result = engine.step()
    try:
        return gather_recorded(result.recorded, engine.topology, engine.world)
    except ValueError as error:
        return str(error)


def test_data_parallel_ranks_agree_on_every_value_and_other_names_are_an_error_on_all(run_ranks):
    assert run_ranks(_on_ranks, 2, False) == [_expected("rank", [0, 1, 10, 11])] * 2
    told = "rank 0 recorded 'of/0' (mean) where rank 1 recorded 'of/1' (mean); record the same names, with the "
    assert run_ranks(_on_ranks, 2, True) == [f"record: {told}same reduce, on every rank"] * 2


def test_stages_have_names_of_their_own_and_tensor_parallel_ranks_one_sum():
    first = [("in", "mean", 6.0, 2), ("all", "max", 3.0, 1), ("tokens", "sum", 5.0, 1)]
    last = [("out", "min", 1.0, 1), ("all", "max", 4.0, 1)]

    def of(sizes):
        ranks = (Topology(sizes, place) for place in range(4))
        return combine([FromRank(here.pp.rank, here.counts_sums, [first, last][here.pp.rank]) for here in ranks])

    want = {"in": 3.0, "all": 4.0, "tokens": 5.0, "out": 1.0}
    assert of({"pp": 2, "dp": 1, "tp": 2}) == of({"tp": 2, "pp": 2}) == want
    assert of({"pp": 2, "dp": 2}) == of({"replicas": 2, "pp": 2}) == want | {"tokens": 10.0}
    told = r"rank 0 recorded 'in' \(mean\), 'tokens' \(sum\) where rank 2 recorded 'out'"
    with pytest.raises(ValueError, match=told):
        combine([FromRank(0, True, rows) for rows in (first, first, last, last)])
