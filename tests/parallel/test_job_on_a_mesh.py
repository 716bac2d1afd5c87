"""A job on tensor-parallel ranks ends where one process does and leaves the same files, with Muon."""

import pytest
from safetensors.torch import load_file

from megamix.train.main import run_job
from tests.builders import run_on_ranks, tiny_job, write_data


def _job(folder, run, tp_size):
    return tiny_job(
        folder,
        vocab_size=280,
        dropout=0.1,
        tokenizer=str(folder / "data/tokenizer.json"),
        dtype="fp32",
        optimizer={"name": "muon", "muon": {"ns_dtype": "fp32", "row_beta2": 0.9}},
        steps=8,
        eval_interval=4,
        tensor={"size": tp_size},
        checkpoint={"folder": str(folder / run), "replica_check_interval": 2},
        log_interval=1,
        precision_interval=4,
    )


def test_a_job_on_tensor_parallel_ranks_ends_where_one_process_does(run_ranks, tmp_path, capsys):
    write_data(tmp_path / "data", tokenizer=True)
    alone = run_job(_job(tmp_path, "alone", 1))
    assert "1 rank(s) on" in capsys.readouterr().out
    losses = run_ranks(run_on_ranks, 2, _job(tmp_path, "divided", 2))
    assert losses[0] == losses[1] == pytest.approx(alone, abs=1e-5)
    # Samples of a data-parallel axis of one: every step has the same ones, and dropout the same units.
    lines = [len((tmp_path / name / "metrics.jsonl").read_text().splitlines()) for name in ("alone", "divided")]
    assert lines[0] == lines[1]
    one, other = (load_file(tmp_path / name / "weights.safetensors") for name in ("alone", "divided"))
    assert one.keys() == other.keys()
    # AdamW makes a whole step of a gradient that is zero but for rounding. So means are compared, far below 0.01.
    assert all(float((one[name] - other[name]).abs().mean()) < 1e-4 for name in one)
    sample = (tmp_path / "divided/sample.txt").read_text()
    assert sample
    assert "<|endoftext|>" not in sample[:13]  # it stands for an empty prompt
