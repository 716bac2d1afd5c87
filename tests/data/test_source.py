"""Each epoch of a source has every token but the first as a target exactly once, on any ranks; the seed decides the
order of its windows.
"""

import numpy as np
import pytest

from megamix.data.sampler import micro_batches
from megamix.data.source import TokenFileSource, TokenSpan
from megamix.data.token_file import TokenFile, TokenFileWriter


def source_of(folder, num_tokens, seq_len=8, seed=1):
    with TokenFileWriter(folder / "t", num_tokens) as writer:
        writer.add(np.arange(num_tokens // 2))
        writer.add(np.arange(num_tokens // 2, num_tokens))
    return TokenFileSource(
        [TokenSpan.whole(TokenFile(folder / "t"))], seq_len=seq_len, vocab_size=num_tokens, seed=seed
    )


def test_an_epoch_has_every_token_but_the_first_as_a_target_once(tmp_path):
    source = source_of(tmp_path, 81)  # tokens are 0, 1, 2, ...: a token is its place in the stream
    rows = source.read(range(10)).tokens
    assert rows.dtype == np.int64
    assert rows.shape == (10, 9)
    assert (np.diff(rows, axis=1) == 1).all()  # windows are stretches of the stream, across document borders
    assert sorted(rows[:, 1:].ravel().tolist()) == list(range(1, 81))


def test_tokens_that_fill_no_window_are_left_over(tmp_path):
    source = source_of(tmp_path, 88)
    assert source.num_windows == 10
    assert source.read(range(50)).tokens.max() == 80


def test_two_ranks_read_what_one_rank_reads(tmp_path):
    source = source_of(tmp_path, 1000)
    ((alone,),) = micro_batches((range(56, 64),), micro_batch_size=8, dp_rank=0, dp_size=1)
    pieces = [
        source.read(samples).tokens
        for dp_rank in range(2)
        for (samples,) in micro_batches((range(56, 64),), micro_batch_size=2, dp_rank=dp_rank, dp_size=2)
    ]
    assert (np.concatenate(pieces) == source.read(alone).tokens).all()


def test_the_seed_decides_the_order(tmp_path):
    one, two = source_of(tmp_path, 1000, seed=1), source_of(tmp_path, 1000, seed=2)
    assert (one.read(range(9)).tokens != two.read(range(9)).tokens).any()


def test_a_file_shorter_than_a_window_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"8 tokens holds no window of model.seq_len \+ 1 = 9; shorten"):
        source_of(tmp_path, 8)


def test_an_id_outside_the_vocabulary_is_found_where_it_is_read(tmp_path):
    # The start of a run reads only a part of a large file.
    source_of(tmp_path, 1000)
    file = TokenFile(tmp_path / "t")
    source = TokenFileSource([TokenSpan.whole(file)], seq_len=8, vocab_size=900, seed=1)
    with pytest.raises(
        ValueError, match=r"t\.bin: holds token id \d+, but model.vocab_size = 900 allows 0 to 899; set"
    ):
        source.read(range(source.num_windows))
