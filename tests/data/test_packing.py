"""Packed rows say where each document begins and which tokens are targets, and use every token once an epoch; parts of
a split are disjoint.
"""

import numpy as np
import pytest
import torch

from megamix.data.loader import IGNORE, BatchLoader, joined
from megamix.data.sampler import BlendStage
from megamix.data.source import BlendedSource, MarkovSource, TokenFileSource, TokenSpan, split
from megamix.data.token_file import TokenFile, TokenFileWriter

CPU = torch.device("cpu")


def write(prefix, lengths, first=0):
    """Write documents of these lengths. Tokens are first, first + 1, ...: a token is its place in the stream."""
    with TokenFileWriter(prefix, first + sum(lengths)) as writer:
        for length in lengths:
            writer.add(np.arange(first, first + length))
            first += length
    return TokenFile(prefix)


def packed(file, seq_len=8):
    return TokenFileSource([TokenSpan.whole(file)], seq_len=seq_len, vocab_size=2**16, seed=1, packed=True)


def test_positions_restart_with_every_document_and_its_first_token_is_no_target(tmp_path):
    source = packed(write(tmp_path / "t", [3, 1, 0, 7, 6]))  # 17 tokens: two windows of 8 and 1 that overlap by one
    with BatchLoader(source, CPU) as loader:
        batch = loader.get(range(2))
    assert batch.positions is not None
    rows = {int(tokens[0]): i for i, tokens in enumerate(batch.tokens)}
    assert batch.positions[rows[0]].tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    assert batch.targets[rows[0]].tolist() == [1, 2, IGNORE, IGNORE, 5, 6, 7, 8]
    assert batch.positions[rows[8]].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]  # a document that was cut begins anew
    assert batch.targets[rows[8]].tolist() == [9, 10, IGNORE, 12, 13, 14, 15, 16]
    assert batch.positions.dtype == torch.int64
    assert (batch.num_counted, batch.weight) == (13, 13 / 16)


@pytest.mark.parametrize("seed", range(5))
def test_every_token_is_read_once_an_epoch_and_all_but_the_first_of_a_document_are_targets_once(tmp_path, seed):
    lengths = np.random.default_rng(seed).integers(1, 30, size=60).tolist()
    file = write(tmp_path / "t", lengths)
    source = packed(file)
    with BatchLoader(source, CPU) as loader:
        for epoch in range(2):
            batch = loader.get(range(epoch * source.num_windows, (epoch + 1) * source.num_windows))
            targets = batch.targets[batch.targets != IGNORE]
            firsts = set(file.document_offsets[:-1].tolist())
            assert sorted(targets.tolist()) == [token for token in range(file.num_tokens) if token not in firsts]
            assert batch.num_counted == len(targets)
            assert batch.positions is not None
            assert batch.num_documents == int((batch.positions == 0).sum())
            # All but the very last token stand in front of something, or of nothing, once.
            read = np.bincount(batch.tokens.ravel().numpy(), minlength=file.num_tokens)
            padding = batch.tokens.numel() - (file.num_tokens - 1)
            assert read[0] in (1, 1 + padding, padding)  # missing tokens of the last window are token 0
            assert read[1:-1].tolist() == [1] * (file.num_tokens - 2)


def test_the_end_of_a_file_is_padded_with_documents_that_predict_nothing(tmp_path):
    source = packed(write(tmp_path / "t", [12]))
    assert source.num_windows == 2
    with BatchLoader(source, CPU) as loader:
        batch = loader.get(range(2))
    row = int((batch.tokens[:, 0] == 8).nonzero())
    assert batch.targets[row].tolist() == [9, 10, 11] + [IGNORE] * 5
    assert batch.positions is not None
    assert batch.positions[row].tolist() == [0, 1, 2, 3, 0, 0, 0, 0]


def test_several_files_are_one_corpus_in_one_order(tmp_path):
    files = [write(tmp_path / name, [41], first) for name, first in (("a", 0), ("b", 100), ("c", 200))]
    source = TokenFileSource([TokenSpan.whole(file) for file in files], seq_len=8, vocab_size=2**16, seed=1)
    rows = source.read(range(15)).tokens
    assert sorted(rows[:, 1:].ravel().tolist()) == [first + token for first in (0, 100, 200) for token in range(1, 41)]
    assert (np.diff(rows, axis=1) == 1).all()  # no window runs on from one file into another


@pytest.mark.parametrize(("share", "first_part"), [(0.5, 50), (0.95, 95), (1 / 3, 33)])
def test_the_parts_of_a_split_share_no_document(tmp_path, share, first_part):
    file = write(tmp_path / "t", [10] * 100)
    training, validation = split(file, share)
    assert training == (file, 0, 10 * first_part)
    assert validation == (file, 10 * first_part, 1000)
    sizes = {"seq_len": 5, "vocab_size": 2**16}
    parts = [TokenFileSource([part], seed=0, packed=True, **sizes) for part in (training, validation)]
    seen = [set(part.read(range(500)).tokens.ravel().tolist()) for part in parts]
    assert seen[0] & seen[1] <= {0}  # the padding
    assert len(seen[0] | seen[1]) == 1000


def test_rows_of_a_blend_are_those_of_its_sources_packed_or_not(tmp_path):
    sources = [packed(write(tmp_path / "t", [5] * 20)), MarkovSource(vocab_size=50, seq_len=8, branching=2, seed=1)]
    blend = BlendedSource(sources, [BlendStage(0, (2, 1))], packed=True)
    rows = blend.read(range(30))
    assert rows.positions is not None
    own = [[0, 0], [0, 0]]
    for i in range(30):
        alone = [source.read(range(count, count + 1)) for source, (count, _) in zip(sources, own, strict=True)]
        (which,) = [n for n in range(2) if (alone[n].tokens == rows.tokens[i]).all()]
        places = alone[which].positions
        assert rows.positions[i].tolist() == (list(range(9)) if places is None else places[0].tolist())
        own[which][0] += 1
    assert [count for count, _ in own] == [20, 10]


def test_parts_of_a_batch_keep_their_exact_count(tmp_path):
    source = packed(write(tmp_path / "t", [3, 1, 7, 6, 5, 9, 2, 2]))
    with BatchLoader(source, CPU) as loader:
        whole = loader.get(range(4))
        parts = loader.load((range(1), range(1, 4)))
        assert joined([loader.get(range(3)), loader.get(range(3, 4))]).num_counted == whole.num_counted
    assert (parts.num_counted, parts.weight) == (whole.num_counted, whole.weight)
    assert whole.positions is not None
    assert parts.positions is not None
    assert torch.equal(parts.positions, whole.positions)
    assert torch.equal(parts.targets, whole.targets)
