"""A token file that is cut, overwritten or extended while it is read is detected by every way to read, and ends all
ranks with 2 before a step has used it. A file that is replaced between its fingerprint and its opening, on one rank or
all, is not trained on.
"""

import errno
import os
import re
from functools import partial
from unittest import mock

import numpy as np
import pytest

from megamix.checkpoint.folder import checkpoints
from megamix.data.source import TokenFileSource, TokenSpan
from megamix.data.steady_file import DataError
from megamix.data.token_file import TokenFile, bin_path, idx_path, token_file_fingerprint, token_file_writer
from megamix.launch.exit_status import WrongDataError
from megamix.launch.run_status import read_status
from megamix.parallel import build
from megamix.tools.ranks import DEADLINE_S
from tests.builders import EXPERTS, run_on_ranks, tiny_job, write_data
from tests.conftest import FULL
from tests.train.fresh_ranks import FreshRanks
from tests.train.recorded import run_recorded

LENGTHS = [5, 0, 300, 1, 1, 90] * 40


def _write(prefix, first=0):
    with token_file_writer(prefix, 10**6) as writer:
        for length in LENGTHS:
            writer.add(np.arange(first + writer.num_tokens, first + writer.num_tokens + length))
    return prefix


def _cut(path):
    os.truncate(path, path.stat().st_size // 2)


def _change_a_byte(path):
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")


def _read_all(prefix):
    """Return every way to read the file, opened before it changes."""
    file = TokenFile(prefix)
    stream = TokenFileSource([TokenSpan.whole(file)], seq_len=16, vocab_size=10**6, seed=1)
    packed = TokenFileSource([TokenSpan.whole(TokenFile(prefix))], seq_len=16, vocab_size=10**6, seed=1, packed=True)
    packed.read(range(4))  # fills its cache
    return {
        "stream": lambda: stream.read(range(4)),
        "packed": lambda: packed.read(range(4)),
        "a stretch": lambda: file.tokens[5:9],
        "offsets": lambda: file.document_offsets[3],
    }


@pytest.mark.parametrize("change", [_cut, _change_a_byte])
@pytest.mark.parametrize("part", [bin_path, idx_path])
def test_each_change_is_told_by_every_way_to_read(tmp_path, change, part):
    ways = _read_all(_write(tmp_path / "train"))
    for read in ways.values():
        read()
    path = part(tmp_path / "train")
    before = path.stat()
    change(path)
    # A change within one tick of the clock might look like none.
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    touched = ("packed", "offsets") if part is idx_path else ("stream", "packed", "a stretch")
    for name, read in ways.items():
        if name not in touched:
            read()
            continue
        with pytest.raises(DataError) as told:
            read()
        assert str(told.value).startswith(f"{path} was changed while it was read: it ")
        assert f"had {before.st_size} bytes and has {path.stat().st_size}, " in str(told.value)


def test_a_file_that_is_replaced_or_removed_is_read_on(tmp_path):
    ways = _read_all(_write(tmp_path / "train"))
    before = [read() for read in ways.values()]
    _write(tmp_path / "other", first=7)
    for part in (bin_path, idx_path):
        part(tmp_path / "other").rename(part(tmp_path / "train"))
        part(tmp_path / "train").chmod(0o600)
    assert np.array_equal(before[2], ways["a stretch"]())
    assert before[3] == ways["offsets"]()
    bin_path(tmp_path / "train").unlink()
    stream, packed = ways["stream"](), ways["packed"]()
    assert np.array_equal(before[0].tokens, stream.tokens)
    assert np.array_equal(before[1].positions, packed.positions)


def test_a_disk_that_fails_is_told_with_the_file_s_name(tmp_path):
    ways = _read_all(_write(tmp_path / "train"))
    with mock.patch.object(os, "pread", side_effect=OSError(errno.EIO, os.strerror(errno.EIO))):
        for read in ways.values():
            with pytest.raises(OSError, match=str(tmp_path / "train")) as told:
                read()
            assert told.value.errno == errno.EIO
    with (
        mock.patch.object(os, "pread", lambda *arguments: b""),
        pytest.raises(DataError, match="fewer come than are asked for"),
    ):
        token_file_fingerprint(tmp_path / "train")


def test_the_system_may_give_less_than_is_there(tmp_path):
    file = TokenFile(_write(tmp_path / "train"))
    whole, pread = file.tokens[:], os.pread
    with mock.patch.object(os, "pread", lambda file, size, place: pread(file, min(size, 7), place)):
        assert np.array_equal(file.tokens[:], whole)


FAULT_AT = 9


def _cut_file(path, victim, rank, number):
    if (rank, number) == (victim, FAULT_AT):
        _cut(path)


def _config(folder, **settings):
    write_data(folder / "data")
    own = {"steps": 5000, "eval_interval": 0, "save_interval": 4, "async_save": False}
    return tiny_job(folder, **own | settings)


def _status(folder):
    status = read_status(folder / "run")
    assert (status.state, status.exit_status) == ("failed", 2)
    return status


@pytest.mark.parametrize("victim", [0, 1] if FULL else [1])
def test_a_file_that_is_cut_while_two_ranks_train_ends_both_with_its_name(tmp_path, victim):
    """The other rank waits for its experts when it learns of it."""
    config = _config(tmp_path, experts=EXPERTS, expert={"size": 2})
    path = tmp_path / "data/train.bin"
    size = path.stat().st_size
    ranks = FreshRanks(config, 2, partial(_cut_file, path, victim))
    assert ranks.join(DEADLINE_S) == [2, 2], ranks.said(0) + ranks.said(1)
    status = _status(tmp_path)
    told = f"{path} was changed while it was read: it had {size} bytes and has {size // 2}, "
    assert re.match(rf"rank [01], attempt \d+: {re.escape(told)}", status.reason)
    assert ranks.said(0).count(told) == 1
    assert told not in ranks.said(1)
    assert status.update <= FAULT_AT + 2
    newest = checkpoints(tmp_path / "run/checkpoints")[0]
    assert int(newest.name.removeprefix("step_")) <= FAULT_AT
    assert not (tmp_path / "run/weights.safetensors").exists()


def test_validation_data_that_are_cut_end_a_rank_alone_with_their_name(tmp_path):
    config = _config(tmp_path, steps=12, eval_interval=4)
    path = tmp_path / "data/valid.bin"
    with pytest.raises(WrongDataError) as told:
        run_recorded(config, before=lambda plan: _cut(path) if plan.launched == 3 else None)
    assert told.value.exit_status == 2
    assert str(told.value).startswith(f"{path} was changed while it was read: it had ")
    assert _status(tmp_path).reason == str(told.value)
    assert checkpoints(tmp_path / "run/checkpoints") == []


def _replace_before_it_is_opened(config, path, victim):
    """Return the run's error if one rank finds another file than those whose fingerprints were compared."""
    right = build.build_model

    def replace_and_build(model, parallelism, topology, *rest, **keys):
        if topology.world.rank == victim:
            path.with_name("valid.bin").rename(path)
            path.with_name("valid.idx").rename(path.with_suffix(".idx"))
        return right(model, parallelism, topology, *rest, **keys)

    with mock.patch.object(build, "build_model", replace_and_build), pytest.raises(WrongDataError) as told:
        run_on_ranks(config)
    return str(told.value)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_file_that_is_replaced_while_the_run_starts_is_not_trained_on(tmp_path, run_ranks, ranks):
    config = _config(tmp_path, valid=None, steps=3)
    case = (config, tmp_path / "data/train.bin", ranks - 1)
    said = run_ranks(_replace_before_it_is_opened, 2, *case) if ranks > 1 else [_replace_before_it_is_opened(*case)]
    assert len({*said}) == 1
    assert said[0].endswith("data.train: its file was replaced or changed while the run started; start again")
    assert _status(tmp_path).update == 0
    assert not (tmp_path / "run/checkpoints").exists()
