"""Jobs with experts: ranks that divide them train, validate, write a sample and save as others do; a run goes on bit
for bit, also where attempts overflow, and its checkpoints load on any layout. The
rows of a run tell the load of each layer's experts, from every stage of a pipeline.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megamix.cli import main
from tests.builders import EXPERTS, run_on_ranks, tiny_job, write_data
from tests.train.outcome import metrics_of
from tests.train.recorded import run_recorded

pytestmark = pytest.mark.uncounted

ALL_PARTS = EXPERTS | {"shared_ffn_hidden_size": 16, "balance_loss": 0.01, "z_loss": 0.001}


def experts_job(folder, name, **changes):
    base = {
        "model": {"experts": ALL_PARTS, "vocab_size": 280}, "data": {"tokenizer": str(folder / "data/tokenizer.json")},
        "training": {"steps": 6, "eval_interval": 3, "global_batch_size": 4},
        "lr_schedule": {"decay_style": "constant"},
    }  # fmt: skip
    return tiny_job(folder / name, base, tokens=folder / "data", **changes)


def weights_of(config):
    return load_file(Path(config.checkpoint.folder) / "weights.safetensors")


def expect_equal(one, other):
    ours, theirs = weights_of(one), weights_of(other)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    folders = (Path(job.checkpoint.folder).parent for job in (one, other))
    assert metrics_of(next(folders)) == metrics_of(next(folders))


def run_bad(config):
    run_recorded(config, bad_attempts=frozenset((1,)))


def test_a_run_that_stops_goes_on_bit_for_bit_where_ranks_divide_experts(run_ranks, tmp_path):
    write_data(tmp_path / "data", tokenizer=True)
    whole = experts_job(tmp_path, "whole", parallelism={"ep_size": 2})
    run_ranks(run_bad, 2, whole)
    biases = {name: value for name, value in weights_of(whole).items() if name.endswith("balance.value")}
    assert len(biases) == 1
    for value in biases.values():
        assert value.abs().max() > 0
        assert abs(float(value.mean())) < 1e-6
    assert (tmp_path / "whole/run/sample.txt").read_text()

    halves = experts_job(tmp_path, "halves", parallelism={"ep_size": 2})
    run_ranks(run_bad, 2, halves.with_keys(training={"steps": 3}))
    run_ranks(run_on_ranks, 2, halves)
    ours, theirs = weights_of(whole), weights_of(halves)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_each_shard_and_recompute_train_the_same_bits(run_ranks, tmp_path):
    write_data(tmp_path / "data", tokenizer=True)
    first = experts_job(tmp_path, "states", parallelism={"ep_size": 2})
    run_ranks(run_bad, 2, first)
    for shard, recompute in (("gradients", "selective"), ("parameters", "full")):
        other = experts_job(tmp_path, shard, parallelism={"ep_size": 2, "shard": shard}, model={"recompute": recompute})
        run_ranks(run_bad, 2, other)
        expect_equal(first, other)


def test_a_run_goes_on_from_any_layout_with_the_same_weights(run_ranks, tmp_path, capsys):
    write_data(tmp_path / "data", tokenizer=True)
    run = experts_job(tmp_path, "a", parallelism={"ep_size": 2}, training={"steps": 2})
    run_ranks(run_on_ranks, 2, run)
    saved = weights_of(run)
    # Loading and saving on another layout changes no bit: no update is left to take.
    for place in ({"ep_size": 1, "dp_size": 1}, {"ep_size": 2, "cp_size": 2}, {"pp_size": 2}, {"ep_size": 2}):
        (tmp_path / "a/run/weights.safetensors").unlink()
        other = run.with_keys(parallelism={"ep_size": 1, **place})
        run_ranks(run_on_ranks, 1 if place.get("dp_size") == 1 else 2, other)
        assert [name for name, value in weights_of(run).items() if not torch.equal(saved[name], value)] == []
    args = ["generate", str(tmp_path / "a/run"), "--prompt", "def ", "--max-new-tokens", "8"]
    assert main(args) == 0
    assert capsys.readouterr().out.startswith("def ")


def loads_of(folder):
    rows = [{tag: row[tag] for tag in row if tag.startswith("load/")} for row in metrics_of(folder)]
    return [row for row in rows if row]


def test_the_load_of_each_layer_is_told_without_biases_and_from_every_stage(run_ranks, tmp_path, capsys):
    write_data(tmp_path / "data", tokenizer=True)
    changes = {
        "model": {"num_layers": 4, "tie_embeddings": False, "experts": {**EXPERTS, "bias_rate": 0.0}},
        "training": {"steps": 3, "eval_interval": 0}, "metrics": {"log_interval": 1},
    }  # fmt: skip
    whole = experts_job(tmp_path, "whole", **changes)
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
    stages = {"pp_size": 2, "pp_schedule": "interleaved_1f1b"}
    run_ranks(run_on_ranks, 2, experts_job(tmp_path, "stages", parallelism=stages, **changes))
    assert loads_of(tmp_path / "stages") == rows
    assert [[*row] for row in loads_of(tmp_path / "stages")] == [[*row] for row in rows]
