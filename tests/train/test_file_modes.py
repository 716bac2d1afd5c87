"""Whoever the umask allows may read what a run writes, also one that gives up: a colleague of the group, or nobody
else.
"""

import os
import stat
from contextlib import suppress

import pytest

from megamix.log.overflows import GaveUpError
from tests.builders import tiny_job, write_data
from tests.train.recorded import run_recorded


def _run_with(umask, folder, bad_attempts):
    tokenizer = str(folder / "data/tokenizer.json")
    more = {"tensorboard": True, "start_step": 1, "num_steps": 1, "max_overflows_in_a_row": 1}
    job = tiny_job(folder, vocab_size=280, tokenizer=tokenizer, steps=3, **more)
    before = os.umask(umask)
    try:
        with suppress(GaveUpError):
            run_recorded(job, bad_attempts)
    finally:
        os.umask(before)


@pytest.mark.parametrize(("umask", "bad"), [(0o077, set()), (0o022, {1})])
def test_those_may_read_a_run_whom_the_umask_lets(tmp_path, run_ranks, umask, bad):
    write_data(tmp_path / "data", tokenizer=True)
    run_ranks(_run_with, 2, umask, tmp_path, bad)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "run").rglob("*")}
    names = {
        "weights.safetensors",
        "metrics.jsonl",
        "manifest.json",
        "journal.jsonl",
        *(["gave_up.txt"] if bad else []),
    }
    assert names <= {path.name for path in modes}
    wrong = {path: mode for path, mode in modes.items() if mode != (0o777 if path.is_dir() else 0o666) & ~umask}
    assert wrong == {}
