"""A value that a forward or loss records counts once, compiled or recomputed, without a host read, and for the engine
that runs the forward. Values of evaluations, probes, discarded steps and traces do not count. Each value is combined
over ranks by its `reduce`; different names on ranks are an error.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from megamix import HeadroomLossScale, Precision, StaticLossScale, add_loss, record
from megamix.cli import main
from megamix.comm.topology import Topology
from megamix.config import ModelConfig
from megamix.inspect.records import FromRank, combine, gather_recorded
from megamix.model.transformer import Transformer
from tests.builders import loss_of, make_batch, make_engine, make_model
from tests.mixed_precision.test_no_host_read import no_host_read


def _record_all(name, value):
    for reduce in ("mean", "sum", "max", "min"):
        record(f"{name}/{reduce}", value, reduce)


def _record_output(module, args, out):
    _record_all("out", out.abs().amax())


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
        block.register_forward_hook(_record_output)
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


def test_nan_and_inf_are_told():
    engine = make_engine()
    for value in (1.0, torch.nan, 2.0):
        _record_all("odd", torch.tensor(value))
    engine.backward(loss_of(engine, make_batch(0, 0, 0)))
    assert all(torch.isnan(value) for value in engine.step().recorded.values().values())


def test_what_is_no_part_of_a_step_does_not_count():
    model = make_model()
    record("alone", torch.ones(()))  # no engine: no effect
    scale = HeadroomLossScale(window=4)
    engine = make_engine(model, precision=Precision(torch.float16, loss_scale=scale))

    def forward(value):
        record("value", torch.tensor(value), "sum")
        return loss_of(engine, make_batch(0, 0, 0))

    engine.backward(forward(1.0))
    engine.probe_loss_scale()
    engine.backward(forward(10.0))
    engine.discard_step()
    model.eval()
    with torch.no_grad():
        forward(100.0)
    model.train()
    engine.backward(forward(1000.0))
    result = engine.step()
    assert _values(result) == {"value": 1000.0}
    engine.backward(loss_of(engine, make_batch(0, 0, 0)))
    result = engine.step()
    assert not result.recorded.num_values
    assert gather_recorded(result.recorded, engine.topology, engine.world) == {}


def test_each_engine_has_what_its_own_forward_recorded():
    engines = [make_engine() for _ in range(2)]
    losses = []
    for number, engine in enumerate(engines):
        losses.append(loss_of(engine, make_batch(0, 0, 0)))
        record("number", torch.tensor(float(number)))
    for engine, loss in zip(engines, losses, strict=True):
        engine.backward(loss)
    assert [_values(engine.step()) for engine in engines] == [{"number": 0.0}, {"number": 1.0}]


def test_two_live_engines_report_each_their_own_however_their_models_are_called():
    models = [make_model() for _ in range(2)]
    engines = [make_engine(model) for model in models]
    for number, model in enumerate(models):
        model.register_forward_hook(lambda module, args, out, number=number: record(f"of/{number}", torch.ones(())))
    for step in range(2):
        losses = [loss_of(model, make_batch(step, 0, 0)) for model in models]  # the modules, not the engines
        for engine, loss in zip(engines, losses, strict=True):
            engine.backward(loss)
        assert [{*_values(engine.step())} for engine in engines] == [{"of/0"}, {"of/1"}]


def test_what_backward_computes_again_is_told_to_no_other_engine():
    models = [make_model(recompute=True) for _ in range(2)]
    engines = [make_engine(model) for model in models]
    for model in models:
        for block in model.blocks:  # its parts are called again
            block.up.register_forward_hook(lambda module, args, out: record("calls", torch.ones(()), "sum"))
    losses = [loss_of(engine, make_batch(0, 0, 0)) for engine in engines]
    for engine, loss in zip(engines, losses, strict=True):
        engine.backward(loss)
    assert [_values(engine.step()) for engine in engines] == [{"calls": len(models[0].blocks)}] * 2


def test_the_micro_batches_of_a_pipeline_report_to_their_own_engine():
    first, second = (make_engine() for _ in range(2))
    with first.micro_batches(1), first.backward_pass(0, []):
        record("piped", torch.ones(()))
    assert not second.progress.recorded_rows
    first.discard_step()


@pytest.mark.parametrize("device", ["meta", "fake"])
def test_a_trace_beside_a_live_engine_reports_to_nobody(device):
    engine = make_engine()
    record("rows", torch.ones(()))
    with FakeTensorMode() if device == "fake" else torch.device("meta"):
        record("rows", torch.ones(()))
        record("traced", torch.ones(()))
    engine.backward(loss_of(engine, make_batch(0, 0, 0)))
    assert _values(engine.step()) == {"rows": 1.0}


def test_a_plan_of_experts_leaves_the_rows_of_a_live_engine_as_they_were(capsys):
    engine = make_engine()
    record("router/balance_loss", torch.ones(()))  # a name that the plan's experts record, too
    assert main(["plan", "configs/quickstart_moe.toml", "--world", "2", "--device", "cpu"]) == 0
    engine.backward(loss_of(engine, make_batch(0, 0, 0)))
    assert _values(engine.step()) == {"router/balance_loss": 1.0}


def test_an_added_loss_has_the_factor_of_the_engine_that_runs_it():
    def gradients(engines):
        losses = [add_loss(loss, loss * 3) for loss in (loss_of(engine, make_batch(0, 0, 0)) for engine in engines)]
        for engine, loss in zip(engines, losses, strict=True):
            engine.backward(loss)
        return [engine.step().grad_norm for engine in engines]

    def engine(scale):
        return make_engine(precision=Precision(torch.float16, loss_scale=StaticLossScale(scale)))

    alone = [gradients([engine(scale)]) for scale in (8.0, 64.0)]
    assert gradients([engine(8.0), engine(64.0)]) == [norm for (norm,) in alone]


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_what_backward_computes_again_counts_once(recompute):
    def recorded(recompute):
        torch.manual_seed(5)
        sizes = {"vocab_size": 32, "seq_len": 8, "hidden_size": 16, "num_layers": 2, "num_heads": 2}
        model = Transformer(ModelConfig(**sizes, qk_norm=True, recompute=recompute))
        for name, module in model.named_modules():
            if name.endswith(("norm", "feed_forward")):
                module.register_forward_hook(_record_output)
        engine = make_engine(model)
        tokens = torch.randint(32, (2, 8))
        engine.backward(engine(tokens, tokens))
        result = engine.step()
        return _values(result) | {"count": float(result.recorded.num_values)}

    assert recorded(recompute) == recorded("none")


@pytest.mark.uncounted
def test_compiled_blocks_record_in_a_graph_that_new_names_do_not_change():
    graphs = []

    def note(graph, inputs):
        graphs.append(graph)
        return graph

    def recorded(compiled):
        torch._dynamo.reset()
        model = make_model(recompute=True)
        for block in model.blocks:
            block.register_forward_hook(_record_output)
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


BAD = [
    (
        partial(record, "loss", torch.ones(2, 3)),
        r"record\('loss'\): must be of shape \(\), got \(2, 3\); pass its mean",
    ),
    (partial(record, "a b", torch.ones(())), r"record\('a b'\): a name is letters, digits"),
    (partial(record, "/a", torch.ones(())), r"record\('/a'\): a name is letters, digits"),
    (partial(record, "x", torch.ones(()), "median"), r"record\('x'\): reduce must be one of mean, sum, max, min, got"),
    (
        partial(record, "good", torch.ones(()), "max"),
        r"record\('good'\): reduce was 'mean' before, got 'max'; use anot",
    ),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_what_cannot_be_recorded_is_refused_by_name(call, message):
    engine = make_engine()
    record("good", torch.ones(()))
    with pytest.raises(ValueError, match=message):
        call()
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


def test_data_parallel_ranks_agree_on_every_value(run_ranks):
    first, second = run_ranks(_on_ranks, 2, False)
    assert first == second == _expected("rank", [0, 1, 10, 11])


def test_other_names_on_another_rank_are_an_error_on_all(run_ranks):
    first, second = run_ranks(_on_ranks, 2, True)
    assert first == second
    assert first == (
        "record: rank 0 recorded 'of/0' (mean) where rank 1 recorded 'of/1' (mean); record the same names, with the "
        "same reduce, on every rank"
    )


def test_stages_have_names_of_their_own_and_tensor_parallel_ranks_one_sum():
    first = [("in", "mean", 6.0, 2), ("all", "max", 3.0, 1), ("tokens", "sum", 5.0, 1)]
    last = [("out", "min", 1.0, 1), ("all", "max", 4.0, 1)]

    def of(sizes):
        ranks = (Topology(sizes, place) for place in range(4))
        return combine([FromRank(here.pp.rank, here.counts_sums, [first, last][here.pp.rank]) for here in ranks])

    want = {"in": 3.0, "all": 4.0, "tokens": 5.0, "out": 1.0}
    assert of({"pp": 2, "dp": 1, "tp": 2}) == of({"tp": 2, "pp": 2}) == want
    assert of({"pp": 2, "dp": 2}) == of({"replicas": 2, "pp": 2}) == want | {"tokens": 10.0}
    with pytest.raises(
        ValueError, match=r"rank 0 recorded 'in' \(mean\), 'tokens' \(sum\) where rank 2 recorded 'out'"
    ):
        combine([FromRank(0, True, rows) for rows in (first, first, last, last)])
