"""Jobs with experts: ranks that divide them train, validate, write a sample and save as others do; a run goes on bit
for bit, also where attempts overflow, and its checkpoints load on any layout. The rows of a run tell the load of each
layer's experts, from every stage of a pipeline. A job over a pipeline has the losses, norms, precision report, weights
and sample of one process; a run goes from a pipeline to data-parallel ranks and back; no job of any test unpickles what
a peer has sent: `run_on_ranks` raises there. The log of a job with products in FP8 names the layers.
"""

import contextlib
import io
import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from megamix.cli.verbs import main
from megamix.config import FP8Config, load_config
from megamix.log.metrics import TAGS
from megamix.model import fp8
from tests.builders import EXPERTS, divided, run_on_ranks, tiny_job, write_data
from tests.distributed.pipelines import SCHEDULES
from tests.train.outcome import metrics_of
from tests.train.recorded import run_recorded

STAGES = {"pipeline": {"size": 2, "schedule": "interleaved_1f1b"}}
ALL_PARTS = EXPERTS | {"shared_ffn_hidden_size": 16, "balance_loss": 0.01, "z_loss": 0.001}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_data(folder, tokenizer=True)
    return folder


def experts_job(folder, data, **settings):
    own = {"experts": ALL_PARTS, "vocab_size": 280, "tokenizer": f"{data}/tokenizer.json", "steps": 6}
    own |= {"eval_interval": 3, "global_batch_size": 4, "decay_style": "constant"}
    return tiny_job(folder, tokens=data, **own | settings)


def weights_of(config):
    return load_file(Path(config.checkpoint.folder) / "weights.safetensors")


def differing(ours, theirs):
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


def run_bad(config):
    run_recorded(config, bad_attempts=frozenset((1,)))


def test_a_run_that_stops_goes_on_bit_for_bit_where_ranks_divide_experts(run_ranks, tmp_path, data):
    short = {"expert": {"size": 2}, "steps": 4, "eval_interval": 2}
    whole, halves = (experts_job(tmp_path / name, data, **short) for name in ("whole", "halves"))
    run_ranks(run_bad, 2, whole)
    weights = weights_of(whole)
    (biases,) = (value for name, value in weights.items() if name.endswith("balance.value"))
    assert biases.abs().max() > 0
    assert abs(float(biases.mean())) < 1e-6
    assert (tmp_path / "whole/run/sample.txt").read_text()
    run_ranks(run_bad, 2, halves.with_keys(training={"steps": 3}))
    run_ranks(run_on_ranks, 2, halves)
    assert differing(weights_of(halves), weights) == []


def test_a_run_goes_on_from_any_layout_with_the_same_weights(run_ranks, tmp_path, data, capsys):
    run = experts_job(tmp_path, data, expert={"size": 2}, steps=2, eval_interval=0)
    run_ranks(run_on_ranks, 2, run)
    saved = weights_of(run)
    # Loading and saving on another layout changes no bit: no update is left to take.
    two = {"size": 2}
    places = (1, {}), (2, {"expert": two, "context": two}), (2, {"pipeline": two}), (2, {"expert": two})
    for ranks, place in places:
        (tmp_path / "run/weights.safetensors").unlink()
        run_ranks(run_on_ranks, ranks, divided(run, **{"expert": {"size": 1}} | place))
        assert differing(weights_of(run), saved) == []
    assert main(["generate", str(tmp_path / "run"), "--prompt", "def ", "--max-new-tokens", "8"]) == 0
    assert capsys.readouterr().out.startswith("def ")


def loads_of(folder):
    rows = [{tag: row[tag] for tag in row if tag.startswith("load/")} for row in metrics_of(folder)]
    return [row for row in rows if row]


def test_the_load_of_each_layer_is_told_without_biases_and_from_every_stage(run_ranks, tmp_path, data, capsys):
    few = {"num_layers": 4, "tie_embeddings": False, "experts": {**EXPERTS, "bias_rate": 0.0}}
    few |= {"steps": 3, "eval_interval": 0, "log_interval": 1}
    whole = experts_job(tmp_path / "whole", data, **few)
    run_on_ranks(whole)
    rows, out = loads_of(tmp_path / "whole"), capsys.readouterr().out
    layers = ["blocks.1", "blocks.2", "blocks.3"]
    names = [["max", "min", "entropy", "counts"], ["max", "min", "entropy"], ["max", "min", "entropy", "counts"]]
    assert [[*row] for row in rows] == [[f"load/{name}/{layer}" for layer in layers for name in each] for each in names]
    tokens = 4 * whole.model.seq_len
    for row in (rows[0], rows[2]):
        for layer in layers:
            counts = row[f"load/counts/{layer}"]
            assert (len(counts), sum(counts)) == (8, 2 * tokens)
            assert row[f"load/max/{layer}"] == max(counts) / (2 * tokens / 8)
        largest = sum(row[f"load/max/{layer}"] for layer in layers) / 3
        assert f"| load {largest:.2f}" in out
    assert not [name for name in weights_of(whole) if "balance" in name]
    run_ranks(run_on_ranks, 2, experts_job(tmp_path / "stages", data, parallelism=STAGES, **few))
    of_stages = loads_of(tmp_path / "stages")
    assert of_stages == rows
    assert [[*row] for row in of_stages] == [[*row] for row in rows]


def pipeline_job(folder, tokens, **settings):
    own = {"vocab_size": 280, "num_layers": 4, "tie_embeddings": False, "steps": 6, "eval_interval": 3}
    own |= {"log_interval": 1, "precision_interval": 2, "save_interval": 3, "replica_check_interval": 2}
    return tiny_job(folder, tokens=tokens, **own | settings)


def _rows(folder):
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return [{tag: value for tag, value in row.items() if tag != TAGS["time"]} for row in rows]


def _values(folder, *tags):
    return [[row[tag] for tag in tags] for row in _rows(folder) if row.keys() >= {*tags}]


@pytest.mark.also_wide
def test_a_pipeline_s_job_is_one_process_s_job(run_ranks, tmp_path, data):
    whole, pipe = tmp_path / "whole", tmp_path / "pipe"
    same = {"tokenizer": str(data / "tokenizer.json"), "steps": 4, "eval_interval": 2}
    expected = run_on_ranks(pipeline_job(whole, data, **same))
    assert run_ranks(run_on_ranks, 2, pipeline_job(pipe, data, parallelism=STAGES, **same)) == [expected] * 2
    for tags in (("train/loss", "optim/grad_norm", "optim/loss_scale"), ("valid/loss",)):
        assert _values(pipe, *tags) == _values(whole, *tags)
    examined, wanted = (
        [row for row in _rows(folder) if "precision/headroom/blocks.3" in row] for folder in (pipe, whole)
    )
    assert examined == wanted != []
    weights, reference = (load_file(folder / "run/weights.safetensors") for folder in (pipe, whole))
    assert weights.keys() == reference.keys()
    assert all(torch.equal(weights[name], reference[name]) for name in reference)
    assert (pipe / "run/sample.txt").read_text() == (whole / "run/sample.txt").read_text()


def test_checkpoints_go_from_a_pipeline_to_data_parallel_ranks_and_back(run_ranks, tmp_path, data):
    """There are three legs of two updates each; every change of layout is one of a resumed run."""
    layouts = [{"pipeline": {"size": 2, "schedule": SCHEDULES[-1]}}, {}, {"pipeline": {"size": 2}}]
    same = {"decay_style": "constant", "tie_embeddings": True, "eval_interval": 0}
    for leg, layout in enumerate(layouts, start=1):
        job = pipeline_job(tmp_path / "moved", data, parallelism=layout, **same | {"steps": 2 * leg})
        run_ranks(run_on_ranks, 2, job)
    run_on_ranks(pipeline_job(tmp_path / "whole", data, **same))
    moved, whole = (dict(_values(tmp_path / name, "step", "train/loss")) for name in ("moved", "whole"))
    assert sorted(whole) == [1, 2, 3, 4, 5, 6]
    # Layouts add up micro-batches, and the two uses of the table, in other orders. A moment or a weight in the wrong
    # place would show in the first digit.
    assert moved == pytest.approx(whole, abs=3e-3)


def trained(config):
    """Train on this rank. Return what it says, and the number of its products in FP8."""
    said = io.StringIO()
    with mock.patch.object(fp8, "product", wraps=fp8.product) as products, contextlib.redirect_stdout(said):
        run_on_ranks(config)
    return said.getvalue(), products.call_count


def test_a_job_names_its_layers(run_ranks, tmp_path, data):
    short = {"warmup_steps": 1, "steps": 2, "global_batch_size": 4, "eval_interval": 1, "log_interval": 1}
    job = tiny_job(tmp_path, tokens=data, ffn_hidden_size=64, tensor={"size": 2}, dtype="bf16", **short)
    job = job.with_keys(precision={"fp8": FP8Config(recipe="rowwise", weight_grad="fp8", but=("blocks.0.*",))})
    (tmp_path / "job.toml").write_text(job.text)
    (said, products), (_, of_other_rank) = run_ranks(trained, 2, load_config(tmp_path / "job.toml"))
    layers = "attention.query, attention.key, attention.value, attention.out, feed_forward.gate, feed_forward.up, "
    assert f"products in FP8, rowwise, emulated on this CPU | {layers}feed_forward.down of layer 1 |" in said
    # Three products of each of the seven layers, in each of two micro-batches.
    assert products == of_other_rank >= 2 * 2 * 7 * 3
