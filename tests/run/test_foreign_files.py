"""A link, a FIFO or a second name in a run folder that others may write to is refused or replaced, never followed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from megamix.cli import main
from megamix.config import config_to_toml
from megamix.inspect.overflows import GaveUpError
from tests.train.jobs import run_on_ranks, run_recorded, tiny_job, write_data

READ_OR_CONTINUED = [
    "config.toml",
    "status.json",
    "run.lock",
    "metrics.jsonl",
    "set_aside.jsonl",
    "ranks.jsonl",
    "events.jsonl",
    "heartbeat.json",
]
WRITTEN_ANEW = [
    "config.toml.partial", "status.json.partial", "weights.safetensors.partial", "sample.txt.partial",
    "sample.txt", "gave_up.txt", "gave_up.txt.partial", "stacks_rank0.txt", "stacks_rank1.txt",
    "trace_rank0.json", "trace_rank0.json.tmp", "trace_rank1.json", "trace_rank1.json.tmp",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path) -> Iterator[Path]:
    """Yield a job's folder, whose run folder is group-writable and holds another user's files; nothing else changes
    later.
    """
    write_data(tmp_path / "data", tokenizer=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "target").write_text("precious")
    yield tmp_path
    assert (tmp_path / "target").read_text() == "precious"


@pytest.mark.parametrize("name", READ_OR_CONTINUED)
@pytest.mark.parametrize("kind", ["link", "FIFO", "hard link"])
def test_what_would_be_followed_or_waited_for_is_refused_before_anything_is_done(
    folder, capsys, name: str, kind: str
) -> None:
    path = folder / "run" / name
    if kind == "link":
        path.symlink_to(folder / "target")
    elif kind == "FIFO":
        os.mkfifo(path)
    else:
        os.link(folder / "target", path)
    (folder / "job.toml").write_text(config_to_toml(tiny_job(folder)))
    assert main(["train", str(folder / "job.toml")]) == 2
    said = capsys.readouterr().err
    assert f"checkpoint.folder: {path} is a " in said
    assert "move it away, or write another folder" in said
    assert [entry.name for entry in (folder / "run").iterdir()] == [name]


def _wrong_modes(run: Path, umask: int) -> dict[str, str]:
    """Return the run's own files with wrong modes; links that nobody wrote to are left out."""
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in run.rglob("*") if not path.is_symlink()}
    assert {"weights.safetensors", "metrics.jsonl", "manifest.json", "status.json"} <= {path.name for path in modes}
    return {
        path.name: oct(mode) for path, mode in modes.items() if mode != (0o777 if path.is_dir() else 0o666) & ~umask
    }


def _run_as_with_umask_077(folder: Path) -> None:
    before = os.umask(0o077)
    try:
        run_on_ranks(
            tiny_job(
                folder,
                model={"vocab_size": 280},
                data={"tokenizer": str(folder / "data/tokenizer.json")},
                training={"steps": 3},
                metrics={"tensorboard": True},
                profiling={"start_step": 1, "num_steps": 1},
            )
        )
    finally:
        os.umask(before)


def test_links_where_a_run_writes_are_replaced_and_only_we_may_read(folder, run_ranks) -> None:
    for name in WRITTEN_ANEW:
        (folder / "run" / name).symlink_to(folder / "target")
    (folder / "run/stacks_rank1.txt").unlink()
    (folder / "run/stacks_rank1.txt/taken").mkdir(parents=True, mode=0o700)  # sends rank 1's stacks to stderr
    (folder / "run/stacks_rank1.txt").chmod(0o700)
    run_ranks(_run_as_with_umask_077, 2, folder)
    assert _wrong_modes(folder / "run", 0o077) == {}
    assert not any((folder / f"run/trace_rank{rank}.json").is_symlink() for rank in (0, 1))


def test_a_run_that_gives_up_replaces_a_link_where_it_says_why_and_all_may_read(folder) -> None:
    for name in ("gave_up.txt", "gave_up.txt.partial"):
        (folder / "run" / name).symlink_to(folder / "target")
    config = tiny_job(folder, precision={"dtype": "bf16", "max_overflows_at_floor": 1}, training={"steps": 3})
    before = os.umask(0o022)
    try:
        with pytest.raises(GaveUpError):
            run_recorded(config, bad_attempts=frozenset({0}))
    finally:
        os.umask(before)
    assert _wrong_modes(folder / "run", 0o022) == {}
    assert (folder / "run/gave_up.txt").read_text().startswith("gave up after")
