"""Whoever loads a checkpoint of other people: a malicious one with right checksums is refused; nothing is executed and
nothing large is allocated.
"""

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megamix.checkpoint.folder import MANIFEST, Files
from megamix.checkpoint.manifest import DamagedCheckpoint
from megamix.checkpoint.save import remove_old
from megamix.checkpoint.verify import verify_checkpoint
from tests.checkpoint.seal import SHARD, edit, seal
from tests.checkpoint.state import save_steps

SLACK = 8 << 20  # bytes: the chunks that a file is read into (2 MiB), and what Python itself takes


class _Bomb:
    def __reduce__(self):
        return os.system, ("touch EXECUTED",)


Make = Callable[[Path], object]  # changes the checkpoint in that folder


def _fields(**values):
    return lambda path: edit(path, lambda fields: fields.update(values))


def _named(name):
    """Give the file another name, and put a copy where that name leads."""

    def make(path):
        shutil.copy(path / SHARD, path.parent / "outside.safetensors")
        edit(path, lambda fields: fields["files"][0].update(name=name))

    return make


def _content(content):
    """Put another content into a file of tensors."""

    def make(path):
        (path / SHARD).write_bytes(content)
        _fields()(path)

    return make


def _header(key, shape, *offsets):
    text = json.dumps({key: {"dtype": "F32", "shape": shape, "data_offsets": offsets}}).encode()
    return _content(struct.pack("<Q", len(text)) + text + bytes(64))


def _tensors(change):
    def make(path):
        tensors = load_file(path / SHARD)
        change(tensors)
        save_file(tensors, path / SHARD)
        _fields()(path)

    return make


def _added(key, tensor=None):
    return _tensors(lambda held: held.update({key: torch.zeros(1) if tensor is None else tensor}))


def _out_of_step(path):
    """Add two blanks to the header, so that no element begins at a multiple of 4."""
    content = (path / SHARD).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = content[8 : 8 + length]
    (path / SHARD).write_bytes(struct.pack("<Q", length + 2) + header + b"  " + content[8 + length :])
    _fields()(path)


def _before_the_start(held):
    held["norm.bias|master|-1"] = held.pop("norm.bias|master|0")


def _of_two_dims(held):
    held["norm.bias|master|0,0"] = held.pop("norm.bias|master|0")


def _twice(held):
    held["norm.bias|master|1"] = held["norm.bias|master|0"][1:].clone()


HUGE = 2**52
PICKLE = pickle.dumps(_Bomb())
HOSTILE = {  # kind of harm: (function that makes it, message)
    "a pickle as tensors": (_content(PICKLE), f"{SHARD}: .*header"),
    "torch's own pickle": (lambda path: (torch.save(_Bomb(), path / SHARD), _fields()(path)), f"{SHARD}: .*header"),
    "a pickle as manifest": (lambda path: (path / MANIFEST).write_bytes(PICKLE), f"{MANIFEST}: .*checksum"),
    "a sealed pickle as manifest": (lambda path: seal(path, PICKLE), f"{MANIFEST}: the text"),
    "a name that leads out": (_named("../outside.safetensors"), "files.0.name"),
    "an absolute name": (_named("/etc/passwd"), "files.0.name"),
    "a name with a line's end": (_named(SHARD + "\n"), "files.0.name"),
    "a header without end": (_content(struct.pack("<Q", 2**60) + b"{}"), f"{SHARD}: .*header too large"),
    "a shape beyond the file": (_header("w|master|0", [HUGE], 0, 64), SHARD),
    "a shape that overflows": (_header("w|master|0,0", [HUGE, HUGE], 0, 64), SHARD),
    "a place beyond the file": (_header("w|master|0", [16], HUGE, HUGE + 64), SHARD),
    "elements out of step": (_out_of_step, f"{SHARD}: .*no multiple of its elements"),
    "integers": (_added("norm.bias|master|0", torch.zeros(24).int()), "I32, the manifest has F32"),
    "halves": (_added("norm.bias|master|0", torch.zeros(24).half()), "F16, the manifest has F32"),
    "a key that is none": (_added("x"), f"{SHARD}: not enough values"),
    "an offset of other dims": (_tensors(_of_two_dims), "norm.bias: .*is no box"),
    "an offset before the start": (_tensors(_before_the_start), "norm.bias: .*is no box"),
    "elements twice": (_tensors(_twice), "norm.bias: .*overlap"),
    "elements missing": (_tensors(lambda held: held.popitem()), "elements are there"),
    "an unknown parameter": (_added("w|master|0"), f"{SHARD}: .*no such state"),
    "a number as text": (_fields(applied_updates="2"), f"{MANIFEST}: applied_updates"),
    "a field nobody knows": (_fields(extra=1), f"{MANIFEST}: extra"),
    "a dtype nobody knows": (_fields(states=[{"master": "F32", "exp_avg": "C64"}]), f"{MANIFEST}: states.0.exp_avg"),
    "a state with a path for a name": (_fields(states=[{"master": "F32", "../x": "F32"}]), f"{MANIFEST}: states.0"),
    "a state of another dtype": (
        _fields(states=[{"master": "F32", "exp_avg": "BF16", "exp_avg_sq": "F32"}]),
        "is F32, the manifest has BF16",
    ),
    "states without dtypes": (_fields(states=["master", "exp_avg", "exp_avg_sq"]), f"{MANIFEST}: states.0"),
    "a buffer without bytes": (
        lambda path: edit(
            path,
            lambda fields: (
                fields["states"].append({"buffer": "I64"}),
                fields["params"].append({"name": "seen", "shape": [], "aliases": [], "states": 1}),
            ),
        ),
        "buffer of seen: 0 of 1 elements",
    ),
}


@pytest.fixture(scope="module")
def ready(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ready")
    save_steps(folder, [2])
    return folder / "step_00000002"


def _peak_bytes():
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_checkpoint_is_refused(ready, tmp_path, monkeypatch, name):
    path = tmp_path / "checkpoint"
    shutil.copytree(ready, path)
    make, told = HOSTILE[name]
    make(path)
    size = sum(file.lstat().st_size for file in ready.iterdir())
    monkeypatch.chdir(tmp_path)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
    before = _peak_bytes()
    with pytest.raises(DamagedCheckpoint, match=told):
        verify_checkpoint(path)
    assert _peak_bytes() - before <= 2 * size + SLACK
    assert not (tmp_path / "EXECUTED").exists()


def test_a_rewritten_checkpoint_with_nothing_wrong_passes(ready, tmp_path):
    path = tmp_path / "checkpoint"
    shutil.copytree(ready, path)
    _tensors(lambda held: None)(path)
    assert verify_checkpoint(path).manifest.params == verify_checkpoint(ready).manifest.params


def test_a_checkpoint_may_be_linked_from_another_disk(ready, tmp_path):
    """Whoever moves checkpoints, or a large file of one, to a larger disk and leaves a link."""
    path = tmp_path / "checkpoint"
    shutil.copytree(ready, tmp_path / "elsewhere")
    shutil.move(tmp_path / "elsewhere" / SHARD, tmp_path / SHARD)
    (tmp_path / "elsewhere" / SHARD).symlink_to(tmp_path / SHARD)
    path.symlink_to(tmp_path / "elsewhere")
    assert verify_checkpoint(path).manifest == verify_checkpoint(ready).manifest


def test_a_checkpoint_that_is_linked_keeps_its_files_when_old_ones_are_removed(ready, tmp_path):
    """Whoever moves old checkpoints to an archive and leaves links."""
    archived, folder = tmp_path / "archive", tmp_path / "checkpoints"
    shutil.copytree(ready, archived)
    folder.mkdir()
    (folder / "step_00000001").symlink_to(archived)
    for update in (2, 3, 4):
        shutil.copytree(ready, folder / f"step_0000000{update}")
    remove_old(folder, 2, folder / "step_00000004", Files())
    assert sorted(path.name[-1] for path in folder.iterdir()) == ["1", "3", "4"]
    assert verify_checkpoint(archived).manifest == verify_checkpoint(ready).manifest
