"""A job over a pipeline has the losses, norms, precision report, weights and sample of one process; a run goes from a
pipeline to data-parallel ranks and back; no job of any test unpickles what a peer has sent: `run_on_ranks` raises
there.
"""

import json

import pytest
import torch
from safetensors.torch import load_file

from megamix.report.metrics import TAGS
from tests.builders import run_on_ranks, tiny_job, write_data
from tests.distributed.pipelines import SCHEDULES

LAYOUT = {"pp_size": 2, "pp_schedule": "interleaved_1f1b"}


def _job(folder, tokens, **overrides):
    own = {
        "model": {"vocab_size": 280, "num_layers": 4, "tie_embeddings": False},
        "training": {"steps": 6, "micro_batch_size": 2, "global_batch_size": 8, "eval_interval": 3},
        "metrics": {"log_interval": 1, "precision_interval": 2},
        "checkpoint": {"save_interval": 3, "replica_check_interval": 2},
    }
    return tiny_job(folder, own, tokens=tokens, **overrides)


def _rows(folder):
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return [{tag: value for tag, value in row.items() if tag != TAGS["time"]} for row in rows]


def _values(folder, *tags):
    return [[row[tag] for tag in tags] for row in _rows(folder) if row.keys() >= {*tags}]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_data(folder, tokenizer=True)
    return folder


@pytest.mark.also_wide
def test_a_pipeline_s_job_is_one_process_s_job(run_ranks, tmp_path, data):
    whole, pipe = tmp_path / "whole", tmp_path / "pipe"
    tokenizer = {"train": str(data / "train"), "valid": str(data / "valid"), "tokenizer": str(data / "tokenizer.json")}
    expected = run_on_ranks(_job(whole, data, data=tokenizer))
    assert run_ranks(run_on_ranks, 2, _job(pipe, data, data=tokenizer, parallelism=LAYOUT)) == [expected] * 2
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
    layouts = [{"pp_size": 2, "pp_schedule": SCHEDULES[-1]}, {}, {"pp_size": 2}]
    same = {
        "lr_schedule": {"decay_style": "constant"},
        "precision": {"loss_scale": {"init_scale": 2.0**10}},
        "model": {"tie_embeddings": True},
    }
    for leg, layout in enumerate(layouts, start=1):
        training = {"steps": 2 * leg, "eval_interval": 0}
        run_ranks(run_on_ranks, 2, _job(tmp_path / "moved", data, parallelism=layout, training=training, **same))
    run_on_ranks(_job(tmp_path / "whole", data, training={"steps": 6, "eval_interval": 0}, **same))
    moved, whole = (dict(_values(tmp_path / name, "step", "train/loss")) for name in ("moved", "whole"))
    assert sorted(whole) == [1, 2, 3, 4, 5, 6]
    # Layouts add up micro-batches, and the two uses of the table, in other orders. A moment or a weight in the wrong
    # place would show in the first digit.
    assert moved == pytest.approx(whole, abs=3e-3)
