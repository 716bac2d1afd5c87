"""Batches have the same rows on 1, 2 and 4 ranks, and after any resumes with other ranks and batch sizes."""

import random

import numpy as np

from megamix.data.sampler import BlendStage, micro_batches
from megamix.data.source import BlendedSource, MarkovSource, TokenFileSource, TokenSpan
from megamix.data.token_file import TokenFile, TokenFileWriter
from megamix.run.batch_plan import BatchPlan
from megamix.run.run_record import Progress
from tests.conftest import FULL

SEQ_LEN = 6


def mixture(folder):
    """Return a mixture of two packed files and a chain, in two stages, with several epochs of each."""
    rng, sources = np.random.default_rng(0), []
    for name in ("a", "b"):
        with TokenFileWriter(folder / name, 1000) as writer:
            for _ in range(10):
                writer.add(rng.integers(0, 1000, size=rng.integers(1, 20)))
        file = TokenSpan.whole(TokenFile(folder / name))
        sources.append(TokenFileSource([file], seq_len=SEQ_LEN, vocab_size=1000, seed=3, packed=True))
    sources.append(MarkovSource(vocab_size=1000, seq_len=SEQ_LEN, branching=4, seed=3))
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


def run(source, draw, resumes, num_samples):
    """Return the rows of all applied updates, in order. The run is interrupted at some updates, and continues from its
    checkpoint with other ranks and another batch size.
    """
    rows = []
    state = None
    for _ in range(resumes + 1):
        dp_size = draw.choice([1, 2, 4])
        size = 2 * dp_size * draw.choice([1, 2, 3])
        updates = (num_samples - len(rows)) // size
        last = _ == resumes
        plan = BatchPlan(10**9, size, "requeue", 3, state)
        for _ in range(updates if last else draw.randint(0, 3)):
            rows += read_batch(source, plan.launch().batch.samples, dp_size)
            plan.settle(False, 1.0)
        # As a checkpoint keeps it.
        progress = Progress(**dict(plan.state()))
        state = Progress.read(progress.model_dump(mode="json"))
    return rows


def test_a_run_reads_the_same_rows_on_1_2_and_4_ranks_and_after_any_resumes(tmp_path):
    source = mixture(tmp_path)
    straight = source.read(range(2600)).tokens.tolist()
    for seed, resumes in enumerate([0, 100, 100] if FULL else [0, 10]):
        rows = run(source, random.Random(seed), resumes, 2600 if FULL else 400)
        assert len(rows) > 300
        assert rows == straight[: len(rows)]


def test_a_batch_that_overflowed_comes_back_with_the_rows_it_had_whatever_the_batch_size_then(tmp_path):
    source, draw = mixture(tmp_path), random.Random(5)
    rows = []
    state = None
    for _ in range(40 if FULL else 12):
        dp_size = draw.choice([1, 2, 4])
        plan = BatchPlan(10**9, 2 * dp_size * draw.choice([1, 2]), "requeue", 10**9, state)
        for _ in range(draw.randint(1, 5)):
            batch = plan.launch().batch
            bad = draw.random() < 0.4
            rows += [] if bad else read_batch(source, batch.samples, dp_size)
            plan.settle(bad, 1.0)
        state = plan.state()
    assert state is not None
    waiting = {sample for one in state.waiting for part in one.batch.samples for sample in part}
    want = source.read(np.array([sample for sample in range(state.cursor) if sample not in waiting])).tokens.tolist()
    assert sorted(rows) == sorted(want)  # each once, none lost
