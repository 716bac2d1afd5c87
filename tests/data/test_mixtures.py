"""Jobs on blends, stages, splits and packed documents give the same results on any ranks, resume bitwise, and have
golden losses; impossible ones are refused.
"""

import math
import random
import tomllib
from unittest import mock

import numpy as np
import pytest

from megamix.config import ConfigError, config_from_dict
from megamix.data.loader import BatchLoader
from megamix.data.source import TokenFileSource
from megamix.data.token_file import token_file_writer
from tests.builders import VOCAB, corpus_of, run_on_ranks, tiny_job
from tests.train.outcome import differences, end_of, metrics_of
from tests.train.recorded import Crash, Record, attempts_recorded, crash_contained, overflows_injected

BAD = frozenset((1, 4))  # attempts that overflow


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for seed, name in enumerate(("a", "b", "c")):
        rng = np.random.default_rng(seed)
        with token_file_writer(folder / name, VOCAB) as writer:
            for length in rng.integers(1, 60, size=200):
                writer.add(rng.integers(0, VOCAB, size=length))
    return folder


def job(folder, files, data, **sections):
    """Return a job on a packed mixture of two files and a chain, validated on the split-off part, unless `data`
    differs.
    """
    train = [{"path": f"{files}/a", "weight": 3}, {"path": f"{files}/b", "weight": 1}, {"markov": 4, "weight": 2}]
    usual = {
        "data": {"valid": None, "train": train, "packing": "documents", "split": [9, 1]},
        "training": {"steps": 8, "eval_interval": 4},
        "checkpoint": {"save_interval": 2},
        "metrics": {"log_interval": 1},
    }
    return tiny_job(folder, usual, {"data": data}, sections)


def listed(files, names, **weight):
    return [{"path": f"{files}/{name}"} | weight for name in names]


def run(config, crash_at=None):
    """Run the job to its end, or until it crashes before an attempt."""
    record = Record()

    def crash(plan):
        if plan.launched == crash_at:
            raise Crash

    with crash_contained(), attempts_recorded(record, crash), overflows_injected(record, BAD, frozenset()):
        record.valid_loss = run_on_ranks(config)
    return record


@pytest.mark.parametrize(
    ("packing", "crashes"), [("documents", (3, 6, 9)), ("best_fit", random.Random(1).sample(range(2, 10), 3))]
)
def test_an_interrupted_run_on_a_staged_mixture_ends_bitwise_as_one_that_never_stopped(
    tmp_path, files, packing, crashes
):
    keys = {"packing": packing, "stages": [{"from_sample": 40, "train": listed(files, "cab", weight=1)}]}
    straight, stopped = (job(tmp_path / name, files, keys) for name in ("straight", "stopped"))
    assert config_from_dict(tomllib.loads(stopped.text)) == stopped
    run(straight)
    for crash_at in (*sorted(crashes), None):
        run(stopped, crash_at)
    assert differences(end_of(tmp_path / "straight"), end_of(tmp_path / "stopped")) == []


@pytest.mark.parametrize("layout", [{}, {"context": {"size": 2}}], ids=["data parallel", "context parallel"])
def test_two_ranks_train_on_best_fit_windows_what_one_does(run_ranks, tmp_path, files, layout):
    train = listed(files, "ab")
    precision = {"dtype": "fp32", "loss_scale": {"rule": "off"}}
    one, two = (
        job(tmp_path / name, files, {"packing": "best_fit", "train": train}, parallelism=keys, precision=precision)
        for name, keys in (("one", {}), ("two", layout))
    )
    run_on_ranks(one)
    run_ranks(run_on_ranks, 2, two)
    rows, others = (metrics_of(tmp_path / name) for name in ("one", "two"))
    for row, other in zip(rows, others, strict=True):
        losses = [tag for tag in row if tag.endswith("/loss")]
        # Ranks sum in another order: a few units of FP32's 6e-8, which four updates hardly grow.
        assert [other[tag] for tag in losses] == pytest.approx([row[tag] for tag in losses], rel=1e-6)


def test_no_batch_is_asked_for_that_the_thread_is_not_told_of(tmp_path, files):
    # Otherwise a step would wait for the disk.
    with (
        mock.patch.object(BatchLoader, "prefetch", autospec=True, side_effect=BatchLoader.prefetch) as prefetch,
        mock.patch.object(BatchLoader, "get", autospec=True, side_effect=BatchLoader.get) as get,
    ):
        run(job(tmp_path, files, {}))
    told, asked = ({call.args for call in each.call_args_list} for each in (prefetch, get))
    assert len({loader for loader, _ in asked}) == 2
    assert asked <= told


def test_what_was_read_may_not_change_and_what_was_not_may(tmp_path, files):
    def weights(*values):
        return [{"path": f"{files}/{name}", "weight": weight} for name, weight in zip("abc", values, strict=False)]

    started = {"train": weights(3, 1), "stages": [{"from_sample": 50, "train": weights(1, 1, 1)}]}
    run(job(tmp_path, files, started), crash_at=5)  # after update 2, saved: cursor 24 or so

    other_mixture = r"data.train: the \d+ samples that were read came from another mixture .* from_sample = \d+ or more"
    refused = [
        ({"train": weights(3, 2)}, other_mixture),
        ({"train": [{"path": f"{files}/c", "weight": 3}, weights(3, 1)[1]]}, r"data.train\[0\]: holds other data"),
        ({"split": [8, 2]}, r"data.split: the checkpoint has \[9.0, 1.0\], the configuration \[8.0, 2.0\]"),
        ({"packing": "none"}, 'data.packing: the checkpoint has "documents", the configuration "none"'),
        ({"packing": "best_fit"}, 'data.packing: the checkpoint has "documents", the configuration "best_fit"'),
    ]
    for changed, words in refused:
        with pytest.raises(ConfigError, match=words):
            run(job(tmp_path, files, started | changed))
    other_words = {"train": [weights(6)[0], {"path": f"{files}/./b", "weight": 2}], "split": [0.9, 0.1]}
    run(job(tmp_path, files, other_words | {"stages": [{"from_sample": 48, "train": f"{files}/c"}]}))
    assert metrics_of(tmp_path)[-1]["step"] == 8


def _trains_on(config):
    return corpus_of(config).training(config.training.seed)


def test_every_key_reaches_the_source_it_is_for(tmp_path, files):
    config = job(tmp_path, files, {})
    assert _trains_on(config).read(range(12)).positions is not None
    assert corpus_of(config).validation()[""].read(range(12)).positions is not None

    def plain(train):
        keys = {"train": train, "split": None, "packing": "none"}
        return job(tmp_path, files, keys, training={"eval_interval": 0})

    assert _trains_on(plain(f"{files}/a")).read(range(3)).positions is None
    assert corpus_of(plain(f"{files}/a")).validation() == {}
    three = listed(files, "abc")
    parts = [_trains_on(plain([part])) for part in three]
    assert _trains_on(plain(three)).num_windows == sum(part.num_windows for part in parts)


def test_all_that_is_wrong_with_the_files_of_a_mixture_is_told_at_once(tmp_path, files):
    train = [*listed(files, ("a", "nowhere", "b"), weight=1), {"markov": 65, "weight": 1}]
    stages = [{"from_sample": 9, "train": listed(files, ("gone", "a"))}]
    problems = corpus_of(job(tmp_path, files, {"train": train, "stages": stages})).problems()
    wrong = [
        *("data.train[1] =", "data.stages[0].train[0] ="),
        *("data.train[3]: got markov = 65,", "data.stages[0].train: "),
    ]
    assert all(problem.startswith(words) for problem, words in zip(problems, wrong, strict=True))
    (problem,) = corpus_of(job(tmp_path, files, {"train": f"{files}/a", "split": [1e6, 1]})).problems()
    assert problem.startswith("data.split: leaves 0 tokens of data.train")


def test_a_stage_of_files_that_were_read_as_another_corpus_is_refused(tmp_path, files):
    # A corpus of several files has another order, so windows would come twice before their epoch is over.
    def staged(train, stage):
        return job(tmp_path, files, {"train": train, "stages": [{"from_sample": 9, "train": stage}]})

    for before, after in (("a", "ab"), ("ab", "b")):
        (problem,) = corpus_of(staged(listed(files, before), listed(files, after))).problems()
        assert "as part of another corpus than data.train does" in problem
    problem, *_ = corpus_of(staged(listed(files, "ab"), listed(files, "ab", weight=1))).problems()
    assert problem.endswith("write the same list in both, or a weight for every file of both")
    assert not corpus_of(staged(listed(files, "ab"), listed(files, "c"))).problems()
    assert not corpus_of(staged(f"{files}/a", listed(files, "ab", weight=1))).problems()
    again = staged(f"{files}/a", f"{files}/./a")  # the same source, not a second one
    assert not corpus_of(again).problems()
    assert isinstance(_trains_on(again), TokenFileSource)


def test_two_files_of_one_length_are_read_in_orders_of_their_own_and_a_single_one_as_ever(tmp_path):
    for name in ("a", "b"):
        with token_file_writer(tmp_path / name, 6401) as writer:
            writer.add(np.arange(6401))  # each window's tokens tell its place

    def places(*names):
        keys = {"train": listed(tmp_path, names, weight=1), "packing": "none", "split": None}
        source = _trains_on(job(tmp_path, tmp_path, keys, model={"vocab_size": 6401}, training={"eval_interval": 0}))
        return source.read(range(200 * len(names))).tokens[:, 0].tolist()

    both = places("a", "b")
    first, second = both[0::2], both[1::2]
    assert first == places("a")
    assert sorted(first) == sorted(second)
    assert sum(one == other for one, other in zip(first, second, strict=True)) < 10


def test_a_made_up_chain_validates_on_other_samples_than_it_trains_on_whatever_the_seed(tmp_path):
    for seed in (0, 1234):
        config = job(tmp_path, tmp_path, {"train": [{"markov": 4}], "packing": "none"}, training={"seed": seed})
        held_out = corpus_of(config).validation()[""]
        seen = {tuple(row) for row in _trains_on(config).read(range(500)).tokens.tolist()}
        assert not seen & {tuple(row) for row in held_out.read(range(500)).tokens.tolist()}


def test_losses_are_means_over_the_targets_that_count_of_training_and_of_validation(tmp_path):
    with token_file_writer(tmp_path / "pairs", VOCAB) as writer:
        for number in range(2000):
            writer.add(np.array([number % VOCAB, number * 7 % VOCAB]))  # half of the tokens begin a document
    run_on_ranks(job(tmp_path, tmp_path, {"train": f"{tmp_path}/pairs"}, training={"steps": 2}, optimizer={"lr": 1e-9}))
    first, *_, validation = metrics_of(tmp_path)
    # A model that knows nothing: ln(vocab), and not half of that.
    assert first["train/loss"] == pytest.approx(math.log(VOCAB), abs=0.1)
    assert validation["valid/loss"] == pytest.approx(math.log(VOCAB), abs=0.1)


GOLDEN = [4.15334, 4.08088, 3.97354, 3.90768, 3.75049, 3.68927, 3.61553, 3.60751]


def test_the_losses_of_a_made_up_chain_are_those_of_every_machine(tmp_path):
    # In FP32 only the order of sums may differ between machines, some 1e-5 of a loss; a change of data, order, model,
    # initial weights or update moves the third digit at least.
    keys = {"train": [{"markov": 4}], "split": [1, 1], "packing": "none"}
    run_on_ranks(job(tmp_path, tmp_path, keys, precision={"dtype": "fp32", "loss_scale": {"rule": "off"}}))
    losses = [row["train/loss"] for row in metrics_of(tmp_path) if "train/loss" in row]
    assert losses == pytest.approx(GOLDEN, abs=2e-4)
