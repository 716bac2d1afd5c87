"""Whoever copies token files, or has a disk that rots: a token file reads back as it was written, in every dtype, and
every kind of damage is found.
"""

import bisect
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megamix.data.token_file import TokenFile, TokenFileWriter, bin_path, idx_path, sampled_blocks, token_file_problems
from megamix.data.token_index import DTYPES

DOCUMENTS = [np.array([1, 2, 3]), np.array([4]), np.array([5, 6])]


def write(prefix, vocab_size=10):
    with TokenFileWriter(prefix, vocab_size) as writer:
        for document in DOCUMENTS:
            writer.add(document)
    return prefix


def problems(prefix, vocab_size=10, seq_len=2):
    return "\n".join(token_file_problems("data.train", str(prefix), vocab_size=vocab_size, seq_len=seq_len))


def test_documents_come_back_as_one_stream(tmp_path):
    token_file = TokenFile(write(tmp_path / "train"))
    assert token_file.tokens[:].tolist() == [1, 2, 3, 4, 5, 6]
    assert (token_file.num_tokens, token_file.num_documents) == (6, 3)


def test_the_files_are_laid_out_byte_by_byte_as_megatron_reads_them(tmp_path):
    prefix = write(tmp_path / "train")
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 4)
    index += struct.pack("<3i", 3, 1, 2) + struct.pack("<3q", 0, 6, 8) + struct.pack("<4q", 0, 1, 2, 3)
    assert idx_path(prefix).read_bytes() == index
    assert bin_path(prefix).read_bytes() == struct.pack("<6H", 1, 2, 3, 4, 5, 6)


@pytest.mark.parametrize(("vocab_size", "code", "itemsize"), [(2**16, 8, 2), (2**16 + 1, 4, 4)])
def test_ids_take_two_bytes_while_the_vocabulary_fits(tmp_path, vocab_size, code, itemsize):
    largest = np.array([vocab_size - 1])
    with TokenFileWriter(tmp_path / "t", vocab_size) as writer:
        writer.add(largest)
    assert TokenFile(tmp_path / "t").tokens[:].tolist() == [vocab_size - 1]
    assert idx_path(tmp_path / "t").read_bytes()[17] == code
    assert bin_path(tmp_path / "t").stat().st_size == itemsize


@pytest.mark.parametrize(("code", "dtype"), DTYPES.items())
def test_files_of_other_writers_with_several_sequences_a_document_are_read(tmp_path, code, dtype):
    size = np.dtype(dtype).itemsize
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, 3, 3)
    index += struct.pack("<3i", 2, 1, 2) + struct.pack("<3q", 0, 2 * size, 3 * size) + struct.pack("<3q", 0, 2, 3)
    idx_path(tmp_path / "v1.2").write_bytes(index)
    np.arange(5, dtype=dtype).tofile(bin_path(tmp_path / "v1.2"))
    token_file = TokenFile(tmp_path / "v1.2")
    assert token_file.tokens[:].tolist() == [0, 1, 2, 3, 4]
    assert token_file.num_documents == 2
    assert token_file.document_offsets[:].tolist() == [0, 3, 5]


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_every_dtype_and_several_sequences_a_document_come_back(tmp_path, dtype):
    with TokenFileWriter(tmp_path / "t", 100, np.dtype(dtype)) as writer:
        writer.add(np.array([1, 2]), np.array([3]))
        writer.add()
        writer.add(np.array([], dtype=np.int64))
        writer.add(np.array([99]))
    token_file = TokenFile(tmp_path / "t")
    assert token_file.dtype == np.dtype(dtype)
    assert token_file.tokens[:].tolist() == [1, 2, 3, 99]
    assert token_file.document_offsets[:].tolist() == [0, 3, 3, 3, 4]
    assert token_file.sequence_lengths[:].tolist() == [2, 1, 0, 1]


def test_document_offsets_are_read_by_number_slice_and_array(tmp_path):
    offsets = TokenFile(write(tmp_path / "train")).document_offsets
    want = [0, 3, 4, 6]
    assert len(offsets) == 4
    assert [offsets[number] for number in range(4)] == want
    assert [type(offsets[0]), type(offsets[3]), offsets[-1]] == [int, int, 6]
    assert offsets[1:3].tolist() == [3, 4]
    assert offsets[np.array([3, 0])].tolist() == [6, 0]
    assert offsets[:].tolist() == want
    assert offsets[:].dtype == np.int64
    assert [bisect.bisect_right(offsets, token) - 1 for token in range(6)] == [0, 0, 0, 1, 2, 2]


def test_a_file_of_numbers_that_are_no_ids_is_refused(tmp_path):
    with TokenFileWriter(tmp_path / "t", 10, np.dtype("<f4")) as writer:
        writer.add(np.array([0.5, 1.5]))
    assert "holds float32, not token ids; write it in an integer dtype" in problems(tmp_path / "t")


@pytest.mark.parametrize("token_ids", [[0, 10], [-1, 0]])
def test_an_id_outside_the_vocabulary_is_never_wrapped_into_the_file(tmp_path, token_ids):
    with (
        pytest.raises(ValueError, match=r"do not fit a vocabulary of 10; give"),
        TokenFileWriter(tmp_path / "t", 10) as writer,
    ):
        writer.add(np.array(token_ids))
    assert list(tmp_path.iterdir()) == []


def test_a_writer_that_fails_leaves_nothing_and_keeps_what_was_there(tmp_path):
    prefix = write(tmp_path / "train")

    def write_half():
        with TokenFileWriter(prefix, 10) as writer:
            writer.add(np.array([9]))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_half()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.bin", "train.idx"]
    assert TokenFile(prefix).num_tokens == 6


@pytest.mark.parametrize("kill_at_rename", [0, 1])
def test_a_writer_killed_while_it_commits_leaves_no_index(tmp_path, monkeypatch, kill_at_rename):
    prefix = write(tmp_path / "train")
    renames = []
    rename = Path.rename

    def killing_rename(self, target):
        renames.append(target)
        if len(renames) > kill_at_rename:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", killing_rename)
    with pytest.raises(KeyboardInterrupt):
        write(prefix)
    assert renames == [bin_path(prefix), idx_path(prefix)][: kill_at_rename + 1]
    assert "train.idx is missing" in problems(prefix)


def test_a_folder_or_a_place_from_where_there_is_none_is_told(tmp_path):
    prefix = write(tmp_path / "train")
    assert f"{prefix.parent} is a folder; write {prefix}" in problems(prefix.parent)
    assert "or start in the folder from which mine/train.idx leads to it" in problems(Path("mine/train"))


def test_a_good_prefix_has_no_problems(tmp_path):
    assert problems(write(tmp_path / "train")) == ""


def _damage(prefix, damage):
    index, tokens = idx_path(prefix).read_bytes(), bin_path(prefix).read_bytes()
    edits = {
        "index gone": lambda: idx_path(prefix).unlink(),
        "tokens gone": lambda: bin_path(prefix).unlink(),
        "tokens short": lambda: bin_path(prefix).write_bytes(tokens[:-2]),
        "tokens long": lambda: bin_path(prefix).write_bytes(tokens + b"\x00"),
        "index empty": lambda: idx_path(prefix).write_bytes(b""),
        "index header cut": lambda: idx_path(prefix).write_bytes(index[:20]),
        "index cut": lambda: idx_path(prefix).write_bytes(index[:-8]),
        "magic": lambda: idx_path(prefix).write_bytes(b"X" + index[1:]),
        "version": lambda: idx_path(prefix).write_bytes(index[:9] + b"\x02" + index[10:]),
        "dtype": lambda: idx_path(prefix).write_bytes(index[:17] + b"\xff" + index[18:]),
        "modes": lambda: idx_path(prefix).write_bytes(index + b"\x00\x01\x00"),
        "count bomb": lambda: idx_path(prefix).write_bytes(index[:25] + b"\xff" + index[26:]),
        "negative length": lambda: idx_path(prefix).write_bytes(index[:34] + b"\xff\xff\xff\xff" + index[38:]),
        "start": lambda: idx_path(prefix).write_bytes(index[:54] + b"\x07" + index[55:]),
        "borders": lambda: idx_path(prefix).write_bytes(index[:-8] + b"\x09" + index[-7:]),
        "borders back": lambda: idx_path(prefix).write_bytes(index[:-16] + b"\x09" + index[-15:]),
    }
    edits[damage]()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("index gone", r"train.idx is missing; expected PREFIX.idx beside PREFIX.bin: run"),
        ("tokens gone", r"train.bin is missing, .*train.idx is there; write both again"),
        ("tokens short", r"train.bin has 10 bytes, its index says 6 tokens of uint16 = 12 bytes; .*copy both again"),
        ("tokens long", r"train.bin has 13 bytes, its index says 6 tokens of uint16 = 12 bytes"),
        ("index empty", r"train.idx has 0 bytes, the header alone has 34; copy it again"),
        ("index header cut", r"train.idx has 20 bytes, the header alone has 34; copy it again"),
        ("index cut", r"train.idx has 94 bytes, its header says 3 sequences and 4 document borders = 102 bytes"),
        ("magic", r"train.idx starts with b'XMIDIDX.* it is no token index; point the prefix"),
        ("version", r"version 2, expected b'MMIDIDX.* version 1"),
        ("dtype", r"dtype code 255, expected one of 1 to 8; write it again"),
        ("modes", r"holds a mode for each of its 3 sequences, .*: write it without modes"),
        ("count bomb", r"its header says 18374686479671623683 sequences"),
        ("negative length", r"sequences do not lie end to end.* write it again"),
        ("start", r"sequences do not lie end to end"),
        ("borders", r"document borders do not run from 0 to 3; write it again"),
        ("borders back", r"document borders do not run from 0 to 3; write it again"),
    ],
)
def test_a_damaged_file_is_refused_by_name_finding_expectation_and_fix(tmp_path, damage, message):
    prefix = write(tmp_path / "train")
    _damage(prefix, damage)
    with pytest.raises(ValueError, match=message):
        TokenFile(prefix)
    assert problems(prefix).startswith(f"data.train = '{prefix}': ")


def test_lengths_below_zero_are_refused_even_where_the_sums_agree(tmp_path):
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 4)
    index += struct.pack("<3i", 4, -1, 3) + struct.pack("<3q", 0, 8, 6) + struct.pack("<4q", 0, 1, 2, 3)
    idx_path(tmp_path / "t").write_bytes(index)
    np.arange(6, dtype="<u2").tofile(bin_path(tmp_path / "t"))
    assert "sequences do not lie end to end" in problems(tmp_path / "t")


def test_documents_that_do_not_begin_with_the_first_sequence_are_refused(tmp_path):
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 3)
    index += struct.pack("<3i", 2, 1, 3) + struct.pack("<3q", 0, 4, 6) + struct.pack("<3q", 1, 2, 3)
    idx_path(tmp_path / "t").write_bytes(index)
    np.arange(6, dtype="<u2").tofile(bin_path(tmp_path / "t"))
    assert "document borders do not run from 0 to 3" in problems(tmp_path / "t")


def test_every_truncation_and_every_flipped_header_byte_is_found(tmp_path):
    prefix = write(tmp_path / "train")
    index = idx_path(prefix).read_bytes()
    damaged = [index[:length] for length in range(len(index))]
    damaged += [index[:place] + bytes([index[place] ^ 0x55]) + index[place + 1 :] for place in range(len(index))]
    for content in damaged:
        idx_path(prefix).write_bytes(content)
        assert problems(prefix), content


def test_an_empty_token_file_is_refused(tmp_path):
    with TokenFileWriter(tmp_path / "t", 10):
        pass
    assert "is empty; prepare it from a corpus with text" in problems(tmp_path / "t")


def test_a_prefix_with_an_ending_is_answered_with_the_ending(tmp_path):
    prefix = write(tmp_path / "train")
    assert "give the prefix without its ending" in problems(bin_path(prefix))


def test_a_vocabulary_larger_than_the_model_s_is_found(tmp_path):
    prefix = write(tmp_path / "train")
    assert problems(prefix, vocab_size=7) == ""
    found = problems(prefix, vocab_size=6)
    assert "holds token id 6, but model.vocab_size = 6 allows 0 to 5; set model.vocab_size to" in found
    assert "(at least 7)" in found


def test_of_a_long_file_blocks_spread_over_it_are_looked_at(tmp_path, monkeypatch):
    prefix = tmp_path / "train"
    with TokenFileWriter(prefix, 2**16) as writer:
        writer.add(np.arange(1000))
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
    assert "or write the file again" in problems(prefix)


def test_a_file_shorter_than_one_sample_is_found(tmp_path):
    prefix = write(tmp_path / "train")
    assert problems(prefix, seq_len=5) == ""
    assert "6 tokens are fewer than one sample of model.seq_len + 1 = 7; shorten" in problems(prefix, seq_len=6)


def test_all_problems_are_told_at_once(tmp_path):
    found = token_file_problems("data.valid", str(write(tmp_path / "t")), vocab_size=3, seq_len=100)
    assert len(found) == 2


def test_the_check_needs_no_torch(tmp_path):
    code = (
        "import sys\n"
        "from megamix.data.token_file import token_file_problems\n"
        f"print(token_file_problems('data.train', {str(tmp_path / 'x')!r}, vocab_size=9, seq_len=9))\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "x.idx is missing" in done.stdout
