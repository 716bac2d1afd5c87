"""Each epoch of a source has every token but the first, of a document if it is packed, as a target exactly once. Packed
rows say where each document begins, parts of a split are disjoint, and the made-up chain has the entropy it states.
Batches have the same rows on 1, 2 and 4 ranks, and after any resumes with other ranks and batch sizes.
"""

import math
import random

import numpy as np
import pytest
import torch

from megamix.data.best_fit import BestFitSource
from megamix.data.loader import IGNORE, BatchLoader, joined
from megamix.data.sampler import Blend, BlendStage, micro_batches
from megamix.data.source import BlendedSource, MarkovSource, TokenFileSource, TokenSpan, split
from megamix.data.token_file import TokenFile, token_file_writer
from megamix.train.batch_plan import BatchPlan
from megamix.train.run_record import Progress
from tests.conftest import FULL


def write(prefix, lengths, first=0):
    """Write documents of these lengths. Tokens are first, first + 1, ...: a token is its place in the stream."""
    with token_file_writer(prefix, first + sum(lengths)) as writer:
        for length in lengths:
            writer.add(np.arange(first, first + length))
            first += length
    return TokenFile(prefix)


def source_of(*files, vocab_size=2**16, packed=False, kind=TokenFileSource):
    spans = [TokenSpan.whole(file) for file in files]
    return kind(spans, seq_len=8, vocab_size=vocab_size, seed=1, packed=packed)


def batch_of(source, samples):
    with BatchLoader(source, torch.device("cpu")) as loader:
        return loader.get(samples)


def test_an_epoch_has_every_token_but_the_first_as_a_target_once(tmp_path):
    source = source_of(write(tmp_path / "t", [40, 48]))  # windows of 8 and 1 that overlap by one, and 7 left over
    assert source.num_windows == 10
    rows = source.read(range(10)).tokens
    assert rows.dtype == np.int64
    assert rows.shape == (10, 9)
    assert (np.diff(rows, axis=1) == 1).all()  # windows are stretches of the stream, across document borders
    assert sorted(rows[:, 1:].ravel().tolist()) == list(range(1, 81))


def test_a_file_shorter_than_a_window_is_refused(tmp_path):
    assert source_of(write(tmp_path / "t", [9])).num_windows == 1
    with pytest.raises(ValueError, match=r"8 tokens holds no window of model.seq_len \+ 1 = 9; shorten"):
        source_of(write(tmp_path / "t", [8]))


def test_an_id_outside_the_vocabulary_is_found_where_it_is_read(tmp_path):
    # The start of a run reads only a part of a large file.
    source = source_of(write(tmp_path / "t", [1000]), vocab_size=900)
    told = r"t\.bin: holds token id \d+, but model.vocab_size = 900 allows 0 to 899; set"
    with pytest.raises(ValueError, match=told):
        source.read(range(source.num_windows))


def test_several_files_are_one_corpus_in_one_order(tmp_path):
    files = [write(tmp_path / name, [41], first) for name, first in (("a", 0), ("b", 100), ("c", 200))]
    rows = source_of(*files).read(range(15)).tokens
    assert sorted(rows[:, 1:].ravel().tolist()) == [first + token for first in (0, 100, 200) for token in range(1, 41)]
    assert (np.diff(rows, axis=1) == 1).all()  # no window runs on from one file into another


def test_positions_restart_with_every_document_and_its_first_token_is_no_target(tmp_path):
    source = source_of(write(tmp_path / "t", [3, 1, 0, 7, 6, 4]), packed=True)  # 21 tokens: the third window is short
    assert source.num_windows == 3
    batch = batch_of(source, range(3))
    rows = {int(tokens[0]): i for i, tokens in enumerate(batch.tokens)}
    assert batch.positions[rows[0]].tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    assert batch.targets[rows[0]].tolist() == [1, 2, IGNORE, IGNORE, 5, 6, 7, 8]
    assert batch.positions[rows[8]].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]  # a document that was cut begins anew
    assert batch.targets[rows[8]].tolist() == [9, 10, IGNORE, 12, 13, 14, 15, 16]
    assert batch.positions[rows[16]].tolist() == [0, 0, 1, 2, 3, 0, 0, 0]  # padded with documents that predict nothing
    assert batch.targets[rows[16]].tolist() == [IGNORE, 18, 19, 20] + [IGNORE] * 4
    assert batch.positions.dtype == torch.int64
    assert (batch.num_counted, batch.weight) == (16, 16 / 24)


@pytest.mark.parametrize("seed", range(5))
def test_every_token_is_read_once_an_epoch_and_all_but_the_first_of_a_document_are_targets_once(tmp_path, seed):
    lengths = np.random.default_rng(seed).integers(1, 30, size=60).tolist()
    file = write(tmp_path / "t", lengths)
    source = source_of(file, packed=True)
    firsts = set(file.document_offsets[:-1].tolist())
    for epoch in range(2):
        batch = batch_of(source, range(epoch * source.num_windows, (epoch + 1) * source.num_windows))
        targets = batch.targets[batch.targets != IGNORE]
        assert sorted(targets.tolist()) == [token for token in range(file.num_tokens) if token not in firsts]
        assert batch.num_counted == len(targets)
        assert batch.num_documents == int((batch.positions == 0).sum())
        # All but the very last token stand in front of something once. Missing ones of the last window are token 0.
        read = np.bincount(batch.tokens.ravel(), minlength=file.num_tokens)
        assert (read[1:-1] == 1).all()


@pytest.mark.parametrize(("share", "first_part"), [(0.95, 95), (1 / 3, 33)])
def test_the_parts_of_a_split_share_no_document(tmp_path, share, first_part):
    file = write(tmp_path / "t", [10] * 100)
    parts = split(file, share)
    assert parts == ((file, 0, 10 * first_part), (file, 10 * first_part, 1000))
    sources = [TokenFileSource([part], seq_len=5, vocab_size=2**16, seed=0, packed=True) for part in parts]
    seen = [set(source.read(range(500)).tokens.ravel().tolist()) for source in sources]
    assert seen[0] & seen[1] <= {0}  # the padding
    assert len(seen[0] | seen[1]) == 1000


def test_rows_of_a_blend_are_those_of_its_sources_packed_or_not(tmp_path):
    sources = [source_of(write(tmp_path / "t", [5] * 20), packed=True), chain(branching=2)]
    stages = [BlendStage(0, (2, 1))]
    rows = BlendedSource(sources, stages, packed=True).read(range(30))
    for i, (source, number) in enumerate(zip(*Blend(stages).locate(np.arange(30)), strict=True)):
        alone = sources[source].read(np.array([number]))
        assert (rows.tokens[i] == alone.tokens).all()
        assert (rows.positions[i] == (range(9) if alone.positions is None else alone.positions)).all()


def test_parts_of_a_batch_keep_their_exact_count(tmp_path):
    source = source_of(write(tmp_path / "t", [3, 1, 7, 6, 5, 9, 2, 2]), packed=True)
    with BatchLoader(source, torch.device("cpu")) as loader:
        whole = loader.get(range(4))
        parts = loader.load((range(1), range(1, 4)))
        assert joined([loader.get(range(3)), loader.get(range(3, 4))]).num_counted == whole.num_counted
    assert (parts.num_counted, parts.weight) == (whole.num_counted, whole.weight)
    assert torch.equal(parts.positions, whole.positions)
    assert torch.equal(parts.targets, whole.targets)


def chain(branching=4):
    return MarkovSource(vocab_size=32, seq_len=8, branching=branching, seed=3)


@pytest.mark.parametrize("branching", [1, 2, 4, 32])
def test_the_entropy_is_the_one_stated(branching):
    rows = chain(branching=branching).read(range(15_000)).tokens
    counts = np.zeros((32, 32))
    np.add.at(counts, (rows[:, :-1].ravel(), rows[:, 1:].ravel()), 1)
    assert ((counts > 0).sum(axis=1) == branching).all()  # every token occurs and has that many successors
    assert counts.sum(axis=0).min() > 0.8 * counts.sum(axis=0).mean()  # and all are about equally frequent
    frequencies = counts / counts.sum()
    conditional = counts / counts.sum(axis=1, keepdims=True)
    entropy = -(frequencies * np.log(np.where(conditional > 0, conditional, 1))).sum()
    assert branching < 32 or len(np.unique(rows, axis=0)) == len(rows)  # no sample comes twice
    # Counting underestimates by about (cells - rows) / (2 draws) = 0.004 nats at most.
    assert math.log(branching) - 0.006 < entropy <= math.log(branching) + 1e-12


def mixture(folder, kind):
    """Return a mixture of two packed files and a chain, in two stages, with several epochs of each."""
    rng = np.random.default_rng(0)
    files = [write(folder / name, rng.integers(1, 20, size=10), 100 * n) for n, name in enumerate("ab")]
    sources = [*(source_of(file, packed=True, kind=kind) for file in files), chain()]
    return BlendedSource(sources, [BlendStage(0, (7, 2, 0)), BlendStage(150, (1, 3, 2))], packed=True)


def read_batch(source, batch, dp_size):
    """Return the rows of a batch as its ranks read them, rank after rank."""
    return [
        row
        for dp_rank in range(dp_size)
        for samples in micro_batches(batch, micro_batch_size=2, dp_rank=dp_rank, dp_size=dp_size)
        for part in samples
        for row in source.read(part).tokens.tolist()
    ]


@pytest.mark.parametrize("kind", [TokenFileSource, BestFitSource])
@pytest.mark.parametrize(("overflowing", "legs"), [(0, 200 if FULL else 20), (0.4, 40 if FULL else 12)])
def test_a_run_reads_the_same_rows_on_1_2_and_4_ranks_and_after_any_resumes_and_overflows(
    tmp_path, overflowing, legs, kind
):
    source, draw = mixture(tmp_path, kind), random.Random(5)
    rows, progress = [], None
    for _ in range(legs):
        dp_size = draw.choice([1, 2, 4])
        plan = BatchPlan(10**9, 2 * dp_size * draw.choice([1, 2, 3]), "requeue", 10**9, progress)
        for _ in range(draw.randint(1, 5)):
            batch = plan.launch().batch
            bad = draw.random() < overflowing
            rows += [] if bad else read_batch(source, batch.samples, dp_size)
            plan.settle(bad, 1.0)
        state = plan.state()
        progress = Progress.read(Progress(**dict(state)).model_dump(mode="json"))  # as a checkpoint keeps it
    waiting = {sample for one in state.waiting for part in one.batch.samples for sample in part}
    want = source.read(np.array([sample for sample in range(state.cursor) if sample not in waiting])).tokens.tolist()
    assert len(rows) > 100
    assert rows == want or (overflowing and sorted(rows) == sorted(want))  # each once, none lost
