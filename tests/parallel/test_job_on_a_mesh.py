"""A job on tensor-parallel ranks ends where one process does and leaves the same files, with Muon too; it can continue
on another mesh.
"""

import pytest
from safetensors.torch import load_file

from megamix.train.job import run_job
from tests.builders import run_on_ranks, tiny_job, write_data

OPTIMIZERS = {"adamw": {}, "muon": {"name": "muon", "muon": {"ns_dtype": "fp32", "row_beta2": 0.9}}}


def _job(folder, run, tp_size, steps=8, optimizer="adamw"):
    return tiny_job(
        folder,
        vocab_size=280,
        dropout=0.1,
        tokenizer=str(folder / "data/tokenizer.json"),
        dtype="fp32",
        optimizer=OPTIMIZERS[optimizer],
        steps=steps,
        eval_interval=4,
        tp_size=tp_size,
        decay_style="constant",  # the same for any number of steps
        checkpoint={"folder": str(folder / run), "save_interval": 4, "replica_check_interval": 2},
        log_interval=1,
        precision_interval=4,
    )


def _lines(folder, name):
    return (folder / name / "metrics.jsonl").read_text().splitlines()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_job_on_tensor_parallel_ranks_ends_where_one_process_does(run_ranks, tmp_path, capsys, optimizer):
    write_data(tmp_path / "data", tokenizer=True)
    alone = run_job(_job(tmp_path, "alone", 1, optimizer=optimizer))
    said = capsys.readouterr().out
    assert "1 rank(s) on" in said
    losses = run_ranks(run_on_ranks, 2, _job(tmp_path, "divided", 2, optimizer=optimizer))
    assert losses[0] == losses[1] == pytest.approx(alone, abs=1e-5)
    # Samples of a data-parallel axis of one: every step has the same ones, and dropout the same units.
    assert len(_lines(tmp_path, "divided")) == len(_lines(tmp_path, "alone"))
    one, other = (load_file(tmp_path / name / "weights.safetensors") for name in ("alone", "divided"))
    assert one.keys() == other.keys()
    # AdamW turns a gradient that is zero but for rounding into a whole step, so by the mean, far below a step of 0.01.
    assert all(float((one[name] - other[name]).abs().mean()) < 1e-4 for name in one)
    sample = (tmp_path / "divided/sample.txt").read_text()
    assert sample
    assert "<|endoftext|>" not in sample[:13]  # it stands for an empty prompt


@pytest.mark.uncounted
def test_a_run_goes_on_with_another_mesh(run_ranks, tmp_path):
    write_data(tmp_path / "data", tokenizer=True)
    went_through = run_job(_job(tmp_path, "through", 1))
    run_ranks(run_on_ranks, 2, _job(tmp_path, "run", 2, steps=4))
    went_on = run_ranks(run_on_ranks, 4, _job(tmp_path, "run", 2))
    assert len({*went_on}) == 1
    assert went_on[0] == pytest.approx(went_through, abs=1e-3)
