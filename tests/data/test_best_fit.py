"""Best-fit packing cuts no document that fits in a window, and has each token but a document's first as a target once
an epoch. Its windows are near a lower bound in number, for lengths of every kind. Rows depend on seed and number alone,
from one file or several, on any ranks and after any resume; padding and cuts are told as they are.
"""

import itertools
import random
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from megamix.base.constants import DEALT_CHUNKS
from megamix.data.best_fit import BestFitSource, plan_windows
from megamix.data.loader import IGNORE, BatchLoader
from megamix.data.sampler import mix64, permute
from megamix.data.source import NO_TOKEN, TokenFileSource, TokenSpan, split
from megamix.data.token_file import TokenFile
from tests.conftest import FULL
from tests.data.packing_figures import LAWS
from tests.data.test_source import write

CPU = torch.device("cpu")


def source_of(*spans, seq_len=8, seed=1, kind=BestFitSource, packed=True):
    spans = [span if isinstance(span, TokenSpan) else TokenSpan.whole(span) for span in spans]
    return kind(spans, seq_len=seq_len, vocab_size=2**20, seed=seed, packed=packed)


def epoch_of(source, number=0):
    return range(number * source.num_windows, (number + 1) * source.num_windows)


def batch_of(source, samples, **settings):
    with BatchLoader(source, CPU, **settings) as loader:
        return loader.get(samples)


def draw(seed):
    """Return a window's length and documents' lengths: some empty, of one token, of a window, of several."""
    rng = np.random.default_rng(seed)
    seq_len = int(rng.integers(3, 40))
    laws = [*LAWS.values(), lambda count, size, rng: rng.integers(0, 3 * size, count)]
    lengths = laws[seed % len(laws)](int(rng.integers(2, 120)), seq_len + 1, rng)
    return seq_len, [*lengths.tolist(), 0, 1, 2, seq_len, seq_len + 1, seq_len + 2, 2 * seq_len + 1]


@pytest.mark.parametrize("seed", range(600 if FULL else 24))
def test_no_document_that_fits_is_cut_and_each_token_but_the_first_is_a_target_once(tmp_path, seed):
    seq_len, lengths = draw(seed)
    file = write(tmp_path / "t", lengths, first=1)  # a token is its place in the stream, and one more
    source = source_of(file, seq_len=seq_len)
    starts = file.document_offsets[:] + 1
    documents = [range(start + 1, stop) for start, stop in itertools.pairwise(starts.tolist())]  # all but the first
    for epoch in range(2):
        batch = batch_of(source, epoch_of(source, epoch))
        assert batch.num_counted == int((batch.targets != IGNORE).sum()) == sum(map(len, documents))
        rows = {int(target): row for row, targets in enumerate(batch.targets) for target in targets[targets != IGNORE]}
        assert sorted(rows) == [token for document in documents for token in document]
        assert all(len({rows[token] for token in one}) <= 1 for one in documents if len(one) <= seq_len)
        counted = batch.targets != IGNORE
        assert torch.equal(batch.targets[counted], batch.tokens[counted] + 1)
        # A piece begins at position 0, and its tokens have one place after the other.
        goes_on = batch.positions[:, 1:][counted[:, :-1]] == batch.positions[:, :-1][counted[:, :-1]] + 1
        assert goes_on.all()
        begun = (batch.positions == 0) & counted
        assert int(begun.sum()) == sum(-(-len(one) // seq_len) for one in documents)
        assert batch.num_documents <= len(batch.tokens) + int((batch.positions[:, 1:] == 0).sum())


def bound_of(counts):
    """Return a lower bound of the windows for pieces of one or two lengths, by duality.

    Give each length a price such that no window's content costs more than 1. Then the windows are at least as many as
    all pieces cost. The best prices lie where the prices of two contents are 1, or one length's price is 0.
    """
    lengths, room = np.flatnonzero(counts), len(counts) - 1
    numbers = counts[lengths]
    contents = [(number, (room - number * lengths[0]) // lengths[-1]) for number in range(room // lengths[0] + 1)]
    lines = [*((one, other, 1) for one, other in contents), (1, 0, 0), (0, 1, 0)]
    best = 0.0
    for (a, b, c), (d, e, f) in itertools.combinations(lines, 2):
        if determinant := a * e - b * d:
            prices = np.array([(c * e - f * b) / determinant, (a * f - d * c) / determinant])
            if prices.min() > -1e-9 and max(np.array(contents) @ prices) < 1 + 1e-9:
                best = max(best, float(numbers @ prices))
    return best


def test_two_lengths_of_any_kind_take_few_more_windows_than_the_bound():
    dice = random.Random(2)
    for _ in range(3000 if FULL else 150):
        room = dice.choice([257, 2049, 131_073])
        one, other = (dice.randint(room // 12, room) for _ in range(2))
        if one != other:
            counts = np.zeros(room + 1, dtype=np.int64)
            share = dice.choice([dice.random(), 1 / 2, 1 / 3, 2 / 3, 1 / 4])
            counts[[one, other]] = round(10**7 * share), round(10**7 * (1 - share))
            bound, windows = bound_of(counts), plan_windows(counts).begins[-1]
            assert bound - 0.01 <= windows <= 1.1 * bound + 2, (room, one, other, share)


@pytest.mark.parametrize("seq_len", [2048, 131_072] if FULL else [2048])
@pytest.mark.parametrize("law", LAWS)
def test_a_plan_takes_each_piece_once_and_pads_little(law, seq_len):
    rng, count = np.random.default_rng(1), 10**7 if FULL else 10**5
    lengths = LAWS[law](count, seq_len + 1, rng)
    counts = np.bincount((lengths - 1) % seq_len + 1, minlength=seq_len + 2)
    counts[1] = 0
    plan = plan_windows(counts)
    times, entries = np.diff(plan.begins), np.diff(plan.firsts)
    taken = np.bincount(plan.lengths, np.repeat(times, entries) * plan.each, minlength=len(counts))
    assert (taken == counts).all()
    loads = np.add.reduceat(plan.lengths * plan.each, plan.firsts[:-1])
    assert loads.max() <= seq_len + 1
    windows, tokens = plan.begins[-1], counts @ np.arange(len(counts))
    # A window has room for one piece over half of it, and for so many tokens.
    least = max(tokens / (seq_len + 1), counts[(seq_len + 1) // 2 + 1 :].sum())
    if " and " in law:
        least = bound_of(counts)
    allowed = 0.001 if law in ("web", "any") else 0.0
    assert 1 - tokens / (windows * (seq_len + 1)) <= max(allowed, 1.1 * (1 - tokens / (least * (seq_len + 1))) + 0.002)


@pytest.mark.skipif(not FULL, reason="10^7 documents")
@pytest.mark.parametrize(("seq_len", "law"), [*((2048, law) for law in LAWS), (131_072, "web"), (131_072, "any")])
def test_ten_million_documents_are_planned(seq_len, law):
    command = [sys.executable, "-m", "tests.data.packing_figures", "1e7", str(seq_len), law]
    print(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def test_windows_and_the_pieces_in_them_have_another_order_each_epoch_and_seed(tmp_path):
    file = write(tmp_path / "t", [4] * 400)  # two documents fill a row but for one token
    rows = [
        source.read(epoch_of(source, epoch)).tokens
        for source in (source_of(file, seed=seed) for seed in (1, 2))
        for epoch in range(3)
    ]
    mates = [{(int(row[0]), int(row[4])) for row in some} for some in rows]
    assert all(len(one & other) < 5 for one, other in itertools.combinations(mates, 2))
    assert all((one[:, 0] != other[:, 0]).mean() > 0.9 for one, other in itertools.combinations(rows, 2))
    mixed = np.concatenate([some[:, 0] for some in rows])
    assert len(set(mixed.tolist())) > 390  # each document is first in some row


def test_a_row_is_a_function_of_its_number_and_the_seed(tmp_path):
    file = write(tmp_path / "t", draw(5)[1], first=1)
    whole = source_of(file).read(range(300))
    numbers = np.random.default_rng(0).permutation(300)[:100]
    some = source_of(TokenFile(tmp_path / "t")).read(numbers)
    assert (some.tokens == whole.tokens[numbers]).all()
    assert (some.positions == whole.positions[numbers]).all()
    for number in numbers[:10].tolist():
        assert (source_of(file).read(range(number, number + 1)).tokens == whole.tokens[number]).all()


def test_files_of_a_list_are_packed_together_and_parts_of_a_split_share_no_document(tmp_path):
    files = [write(tmp_path / name, lengths, first) for name, lengths, first in (
        ("a", [6, 30, 3], 1), ("b", [], 0), ("c", [3, 3, 6] * 5, 100),
    )]  # fmt: skip
    source = source_of(files[0], files[2])
    batch = batch_of(source, epoch_of(source))
    targets = sorted(batch.targets[batch.targets != IGNORE].tolist())
    want = [first + token for first in (1, 7, 37) for token in range(1, {1: 6, 7: 30, 37: 3}[first])]
    starts = np.cumsum([0, *[3, 3, 6] * 5])
    want += [100 + token for token in range(60) if token not in starts]
    assert targets == want
    assert any((row < 40).any() and (row >= 100).any() for row in batch.tokens)  # windows of both files

    file = write(tmp_path / "d", [10] * 99 + [5], first=1)
    parts = [source_of(part, seq_len=12) for part in split(file, 0.9)]
    seen = [{*source.read(epoch_of(source)).tokens.ravel().tolist()} - {NO_TOKEN} for source in parts]
    assert seen == [{*range(1, 901)}, {*range(901, 996)}]


def test_ranks_that_divide_sequences_get_the_rows_of_one_rank(tmp_path):
    file = write(tmp_path / "t", draw(11)[1] * 5, first=1)
    source = source_of(file, seq_len=2 * DEALT_CHUNKS)
    one, dealt = batch_of(source, range(40)), batch_of(source, range(40), num_dealt=2)
    assert all(torch.equal(getattr(one, name), getattr(dealt, name)) for name in ("tokens", "targets", "positions"))
    assert dealt.num_counted == one.num_counted
    assert (dealt.deal.flatten(1).sort().values == torch.arange(2 * DEALT_CHUNKS)).all()


@pytest.mark.parametrize("packing", ["none", "documents", "best_fit"])
def test_padding_and_cut_documents_are_told_as_they_are(tmp_path, packing):
    for seed in range(12):
        seq_len, lengths = draw(seed)
        span = split(write(tmp_path / f"t{seed}", lengths, first=1), 0.8)[0]
        kind = BestFitSource if packing == "best_fit" else TokenFileSource
        source = source_of(span, seq_len=seq_len, kind=kind, packed=packing != "none")
        rows = [{*row} - {0, NO_TOKEN} for row in source.read(epoch_of(source)).tokens.tolist()]
        size = seq_len + 1
        assert source.padding == pytest.approx(1 - sum(map(len, rows)) / (len(rows) * size), abs=1e-12)
        offsets = span.file.document_offsets[:].clip(span.start, span.stop) + 1
        documents = [{*range(start, stop)} for start, stop in itertools.pairwise(offsets.tolist()) if start < stop]
        cut = [one for one in documents if 1 < len(one) <= size and not any(one <= row for row in rows)]
        short = packing == "none" and cut and max(map(max, rows)) < max(cut[-1])  # of the tokens that fill no window
        assert abs(source.cut_documents() * len(documents) - len(cut)) < 1e-9 or short
        assert packing != "best_fit" or not cut


def test_orders_of_many_sizes_at_once_are_those_of_one_size_each():
    sizes = np.array([1, 2, 3, 7, 64, 65, 1009, 10**12])
    keys = mix64(np.uint64(3), np.arange(len(sizes), dtype=np.uint64))
    alone = [int(permute(np.array([0]), int(size), keys[[i]])[0]) for i, size in enumerate(sizes)]
    assert permute(np.zeros(len(sizes), dtype=np.int64), sizes, keys).tolist() == alone


def test_documents_without_a_target_are_refused(tmp_path):
    with pytest.raises(ValueError, match=re.escape("holds no window of model.seq_len + 1 = 9")):
        source_of(write(tmp_path / "t", [1] * 50))
