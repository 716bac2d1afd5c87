"""Whoever copies token files, or has a disk that rots: Megatron's token files are read in every dtype, ours are written
like them, and every kind of damage is found.
"""

import struct
from pathlib import Path

import numpy as np
import pytest

from megamix.data.token_file import (
    TokenFile,
    bin_path,
    idx_path,
    sampled_blocks,
    token_file_problems,
    token_file_writer,
)
from tests.data.fixtures.megatron.write import DOCUMENTS, DTYPES

FIXTURES = Path(__file__).parent / "fixtures" / "megatron"


def write(prefix, documents=([1, 2, 3], [4], [5, 6]), vocab_size=10):
    with token_file_writer(prefix, vocab_size) as writer:
        for document in documents:
            writer.add(np.array(document, dtype=np.int64))
    return prefix


def problems(prefix, vocab_size=10, seq_len=2):
    return "\n".join(token_file_problems("data.train", str(prefix), vocab_size=vocab_size, seq_len=seq_len))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_megatron_core_wrote_is_read(dtype):
    token_file = TokenFile(FIXTURES / dtype)
    assert token_file.dtype == np.dtype(dtype)
    documents = [sum(document, []) for document in DOCUMENTS]
    assert token_file.tokens[:].tolist() == sum(documents, [])
    assert token_file.document_offsets[:].tolist() == [0, *np.cumsum([*map(len, documents)])]
    assert token_file.num_documents == len(DOCUMENTS)


def test_an_index_has_the_layout_of_megatron_whatever_the_stretches(tmp_path, monkeypatch):
    for chunk in (2**20, 2):
        monkeypatch.setattr("megamix.data.token_index._CHUNK", chunk)
        assert idx_path(write(tmp_path / "train")).read_bytes() == _index([3, 1, 2], [0, 6, 8], [0, 1, 2, 3])


@pytest.mark.parametrize(("vocab_size", "code", "itemsize"), [(2**16, 8, 2), (2**16 + 1, 4, 4)])
def test_ids_take_two_bytes_while_the_vocabulary_fits(tmp_path, vocab_size, code, itemsize):
    prefix = write(tmp_path / "t", [[vocab_size - 1]], vocab_size)
    assert TokenFile(prefix).tokens[:].tolist() == [vocab_size - 1]
    assert idx_path(prefix).read_bytes()[17] == code
    assert bin_path(prefix).stat().st_size == itemsize


def test_document_offsets_are_read_by_number_slice_and_array(tmp_path):
    offsets = TokenFile(write(tmp_path / "train")).document_offsets
    assert [offsets[number] for number in range(-1, 4)] == [6, 0, 3, 4, 6]
    assert [len(offsets), type(offsets[0]), type(offsets[3])] == [4, int, int]
    assert offsets[1:3].tolist() == [3, 4]
    assert offsets[np.array([3, 0])].tolist() == [6, 0]
    assert offsets[:].dtype == np.int64


def test_a_file_of_numbers_that_are_no_ids_is_refused():
    assert "holds float32, not token ids; write it in an integer dtype" in problems(FIXTURES / "float32")


@pytest.mark.parametrize("token_ids", [[0, 10], [-1, 0]])
def test_an_id_outside_the_vocabulary_is_never_wrapped_into_the_file_and_keeps_what_was_there(tmp_path, token_ids):
    prefix = write(tmp_path / "train")
    with pytest.raises(ValueError, match=r"do not fit a vocabulary of 10; give"):
        write(prefix, [[9], token_ids])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.bin", "train.idx"]
    assert TokenFile(prefix).num_tokens == 6


@pytest.mark.parametrize("kill_at_rename", [0, 1])
def test_a_writer_killed_while_it_commits_leaves_no_index(tmp_path, monkeypatch, kill_at_rename):
    prefix = write(tmp_path / "train")
    renames = []
    rename = Path.rename

    def killing_rename(path, target):
        renames.append(target)
        if len(renames) > kill_at_rename:
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", killing_rename)
    with pytest.raises(KeyboardInterrupt):
        write(prefix)
    assert renames == [bin_path(prefix), idx_path(prefix)][: kill_at_rename + 1]
    assert "train.idx is missing" in problems(prefix)


def test_what_is_no_prefix_is_answered_with_one(tmp_path):
    prefix = write(tmp_path / "train")
    assert f"{prefix.parent} is a folder; write {prefix}" in problems(prefix.parent)
    assert "or start in the folder from which mine/train.idx leads to it" in problems(Path("mine/train"))
    assert "give the prefix without its ending" in problems(bin_path(prefix))


def _index(lengths, starts, borders):
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(lengths), len(borders))
    return head + np.array(lengths, "<i4").tobytes() + np.array([*starts, *borders], "<i8").tobytes()


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        (lambda index: index[:20], r"train.idx has 20 bytes, the header alone has 34; copy it again"),
        (lambda index: index[:-8], r"train.idx has 94 bytes, its header says 3 sequences and 4 document borders = 102"),
        (lambda index: b"X" + index[1:], r"train.idx starts with b'XMIDIDX.* it is no token index; point the prefix"),
        (lambda index: index[:9] + b"\x02" + index[10:], r"version 2, expected b'MMIDIDX.* version 1"),
        (lambda index: index[:17] + b"\xff" + index[18:], r"dtype code 255, expected one of 1 to 8; write it again"),
        (
            lambda index: index + b"\x00\x01\x00",
            r"holds a mode for each of its 3 sequences, .*: write it without modes",
        ),
        (lambda _: _index([4, -1, 3], [0, 8, 6], [0, 1, 2, 3]), r"sequences do not lie end to end.* write it again"),
        (lambda _: _index([3, 1, 2], [0, 7, 8], [0, 1, 2, 3]), r"sequences do not lie end to end"),
        (lambda _: _index([2, 1, 3], [0, 4, 6], [1, 2, 3]), r"document borders do not run from 0 to 3; write it again"),
        (lambda _: _index([3, 1, 2], [0, 6, 8], [0, 1, 2, 9]), r"document borders do not run from 0 to 3"),
        (lambda _: _index([3, 1, 2], [0, 6, 8], [0, 2, 1, 3]), r"document borders do not run from 0 to 3"),
        (lambda _: _index([3, 1, 2], [0, 6, 8], []), r"document borders do not run from 0 to 3"),
    ],
)
def test_a_damaged_index_is_refused_by_name_finding_expectation_and_fix(tmp_path, damaged, message):
    prefix = write(tmp_path / "train")
    idx_path(prefix).write_bytes(damaged(idx_path(prefix).read_bytes()))
    with pytest.raises(ValueError, match=message):
        TokenFile(prefix)
    assert problems(prefix).startswith(f"data.train = '{prefix}': ")


def test_tokens_that_are_short_or_gone_are_refused_likewise(tmp_path):
    prefix = write(tmp_path / "train")
    bin_path(prefix).write_bytes(bytes(10))
    assert "train.bin has 10 bytes, its index says 6 tokens of uint16 = 12 bytes" in problems(prefix)
    bin_path(prefix).unlink()
    assert f"train.bin is missing, {idx_path(prefix)} is there; write both again" in problems(prefix)
    assert "0 tokens are fewer than one sample of model.seq_len + 1 = 3" in problems(write(prefix, []))


def test_every_truncation_and_every_flipped_header_byte_is_found(tmp_path):
    prefix = write(tmp_path / "train")
    index = idx_path(prefix).read_bytes()
    damaged = [index[:length] for length in range(len(index))]
    damaged += [index[:place] + bytes([index[place] ^ 0x55]) + index[place + 1 :] for place in range(len(index))]
    for content in damaged:
        idx_path(prefix).write_bytes(content)
        assert problems(prefix), content


def test_a_vocabulary_larger_than_the_model_s_is_found(tmp_path):
    prefix = write(tmp_path / "train")
    assert problems(prefix, vocab_size=7) == ""
    found = problems(prefix, vocab_size=6)
    assert "holds token id 6, but model.vocab_size = 6 allows 0 to 5; set model.vocab_size to" in found
    assert "(at least 7)" in found


def test_of_a_long_file_blocks_spread_over_it_are_looked_at(tmp_path, monkeypatch):
    prefix = write(tmp_path / "train", [range(1000)], 2**16)
    assert TokenFile(prefix).sampled_id_outside(999) == 999  # a small file is looked at whole
    monkeypatch.setattr("megamix.data.token_file._SAMPLED", 4)
    monkeypatch.setattr("megamix.data.token_file._BLOCK", 20)
    assert sampled_blocks(2000) == [(0, 20), (500, 520), (1000, 1020), (1500, 1520)]
    assert TokenFile(prefix).sampled_id_outside(759) == 759
    assert TokenFile(prefix).sampled_id_outside(760) is None


def test_a_negative_id_of_a_signed_file_is_found(tmp_path):
    prefix = write(tmp_path / "train", vocab_size=2**17)
    np.array([1, 2, 3, -4, 5, 6], dtype="<i4").tofile(bin_path(prefix))
    assert "holds token id -4" in problems(prefix)
    assert "or prepare the text again by the model's own tokenizer (--tokenizer)" in problems(prefix)


def test_a_file_shorter_than_one_sample_is_found_with_all_other_problems(tmp_path):
    prefix = write(tmp_path / "train")
    assert problems(prefix, seq_len=5) == ""
    found = problems(prefix, vocab_size=3, seq_len=6)
    assert "6 tokens are fewer than one sample of model.seq_len + 1 = 7; shorten" in found
    assert "holds token id 6" in found
