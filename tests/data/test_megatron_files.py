"""Token files are read and written as Megatron's, for every dtype and number of sequences a document; fuzzed indices
are refused or read right.
"""

import importlib.util
import random
import struct
from pathlib import Path

import numpy as np
import pytest

from megamix.data.token_file import TokenFile, TokenFileWriter, bin_path, idx_path
from tests.conftest import FULL
from tests.data.fixtures.megatron.write import DOCUMENTS, DTYPES
from tests.data.fixtures.megatron.write import write as write_by_megatron

FIXTURES = Path(__file__).parent / "fixtures" / "megatron"
FUZZED = 10_000 if FULL else 500
HAS_MEGATRON = importlib.util.find_spec("megatron") is not None


def write(prefix, dtype):
    with TokenFileWriter(prefix, 128, np.dtype(dtype)) as writer:
        for document in DOCUMENTS:
            writer.add(*(np.array(sequence, dtype=np.int64) for sequence in document))
    return prefix


def documents(token_file):
    offsets = token_file.document_offsets[:].tolist()
    return [token_file.tokens[start:end].tolist() for start, end in zip(offsets, offsets[1:], strict=False)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_megatron_core_wrote_is_read_and_would_be_written_alike(tmp_path, dtype):
    token_file = TokenFile(FIXTURES / dtype)
    assert token_file.dtype == np.dtype(dtype)
    assert documents(token_file) == [sum(document, []) for document in DOCUMENTS]
    ours = write(tmp_path / dtype, dtype)
    assert bin_path(ours).read_bytes() == bin_path(FIXTURES / dtype).read_bytes()
    assert idx_path(ours).read_bytes() == idx_path(FIXTURES / dtype).read_bytes()


@pytest.mark.skipif(not FULL, reason="megatron-core is no dependency: run with --full where it can be imported")
@pytest.mark.parametrize("dtype", DTYPES)
def test_megatron_core_itself_reads_ours_and_writes_what_we_read(tmp_path, dtype):
    if not HAS_MEGATRON:
        pytest.skip("megatron.core cannot be imported; unpack megatron-core 0.16.1 and set PYTHONPATH to it")
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    theirs = IndexedDataset(str(write(tmp_path / "ours", dtype)), mmap=True)
    assert [sequence.tolist() for sequence in theirs] == [sequence for document in DOCUMENTS for sequence in document]
    borders = theirs.document_indices.tolist()
    assert np.diff(borders).tolist() == [len(document) for document in DOCUMENTS]
    write_by_megatron(tmp_path)
    assert documents(TokenFile(tmp_path / dtype)) == [sum(document, []) for document in DOCUMENTS]


def _fuzzed(pick, index):
    """Return the index with a few fields replaced, by values near the old ones or at the ends of their ranges."""
    content = bytearray(index)
    for _ in range(pick.randint(1, 3)):
        kind = pick.randrange(6)
        if kind == 0:  # any byte
            content[pick.randrange(len(content))] = pick.randrange(256)
        elif kind == 1:  # a count of the header
            value = pick.choice([0, 1, 2, 5, 6, 7, 8, 2**31, 2**63, 2**64 - 1, pick.randrange(20)])
            struct.pack_into("<Q", content, pick.choice([18, 26]), value)
        elif kind == 2:
            content[17] = pick.randrange(10)
        elif kind == 3:  # anything of eight bytes behind the header
            place = pick.randrange(34, max(35, len(content) - 8))
            content[place : place + 8] = struct.pack("<q", pick.choice([-1, 0, 1, 5, 2**62, -(2**63), 2**63 - 1]))
        elif kind == 4:
            content = content[: pick.randrange(34, len(content) + 1)]
        else:
            content += bytes(pick.randrange(1, 20))
        if len(content) < 60:
            break
    return bytes(content)


@pytest.mark.uncounted
def test_a_fuzzed_index_is_refused_or_read_right_and_never_past_the_end(tmp_path):
    pick = random.Random(20)
    prefix = tmp_path / "t"
    num_read = 0
    for dtype in DTYPES:
        index, tokens = idx_path(FIXTURES / dtype).read_bytes(), bin_path(FIXTURES / dtype).read_bytes()
        bin_path(prefix).write_bytes(tokens)
        for _ in range(FUZZED // len(DTYPES)):
            idx_path(prefix).write_bytes(_fuzzed(pick, index))
            try:
                token_file = TokenFile(prefix)
            except ValueError:
                continue
            num_read += 1
            # Whatever the documents are now, together they are the file.
            assert token_file.tokens[:].tobytes() == tokens
            assert np.array_equal(sum(documents(token_file), []), token_file.tokens[:])
            assert len(documents(token_file)) == token_file.num_documents == len(token_file.document_offsets) - 1
    assert num_read > FUZZED // 100
