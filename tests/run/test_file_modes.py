"""Whoever the umask allows may read what a run writes: a colleague of the group, or nobody else."""

import os
import stat

import pytest

from megamix.inspect.overflows import GaveUpError
from tests.builders import run_on_ranks, tiny_job, write_data
from tests.train.recorded import run_recorded


def _wrong_modes(run, umask):
    """Return the run's files with wrong modes."""
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in run.rglob("*")}
    assert {"weights.safetensors", "metrics.jsonl", "manifest.json", "status.json"} <= {path.name for path in modes}
    return {
        path.name: oct(mode) for path, mode in modes.items() if mode != (0o777 if path.is_dir() else 0o666) & ~umask
    }


def _run_as_with_umask_077(folder):
    before = os.umask(0o077)
    try:
        run_on_ranks(
            tiny_job(
                folder,
                vocab_size=280,
                tokenizer=str(folder / "data/tokenizer.json"),
                steps=3,
                tensorboard=True,
                start_step=1,
                num_steps=1,
            )
        )
    finally:
        os.umask(before)


def test_only_we_may_read_if_the_umask_says_so(tmp_path, run_ranks):
    write_data(tmp_path / "data", tokenizer=True)
    run_ranks(_run_as_with_umask_077, 2, tmp_path)
    assert _wrong_modes(tmp_path / "run", 0o077) == {}


def test_all_may_read_a_run_that_gives_up(tmp_path):
    write_data(tmp_path / "data", tokenizer=True)
    config = tiny_job(tmp_path, dtype="bf16", max_overflows_at_floor=1, steps=3)
    before = os.umask(0o022)
    try:
        with pytest.raises(GaveUpError):
            run_recorded(config, bad_attempts=frozenset({0}))
    finally:
        os.umask(before)
    assert _wrong_modes(tmp_path / "run", 0o022) == {}
    assert (tmp_path / "run/gave_up.txt").read_text().startswith("gave up after")
