"""Jobs on blends, stages, splits and packed documents give the same results on any ranks, resume bitwise, and have
golden losses; impossible ones are refused.
"""

import math
import tomllib

import numpy as np
import pytest

from megamix.builders.data import data_problems, training_source, validation_sources
from megamix.config import ConfigError, config_from_dict, config_to_toml
from megamix.data.loader import BatchLoader
from megamix.data.source import TokenFileSource
from megamix.data.token_file import TokenFileWriter
from tests.builders import VOCAB, run_on_ranks, tiny_job
from tests.train.outcome import differences, end_of, metrics_of
from tests.train.recorded import Crash, Record, attempts_recorded, crash_contained, overflows_injected

BAD = frozenset((1, 4))  # attempts that overflow


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for seed, name in enumerate(("a", "b", "c")):
        rng = np.random.default_rng(seed)
        with TokenFileWriter(folder / name, VOCAB) as writer:
            for length in rng.integers(1, 60, size=200):
                writer.add(rng.integers(0, VOCAB, size=length))
    return folder


def job(folder, files, data, **sections):
    """Return a job on a packed mixture of two files and a chain, validated on the split-off part, unless `data`
    differs.
    """
    train = [{"path": f"{files}/a", "weight": 3}, {"path": f"{files}/b", "weight": 1}, {"markov": 4, "weight": 2}]
    keys = {"train": train, "packing": "documents", "split": [9, 1]} | data
    config = {
        "precision": {"loss_scale": {"init_scale": 2.0**10}},
        "training": {"steps": 8, "eval_interval": 4},
        "checkpoint": {"folder": str(folder / "run"), "save_interval": 2},
        "metrics": {"log_interval": 1},
    }
    config = {name: config.get(name, {}) | sections.get(name, {}) for name in {*config, *sections}}
    return tiny_job(folder, data={"valid": None} | keys, **config)


def run(config, crash_at=None):
    """Run the job to its end, or until it crashes before an attempt."""
    record = Record()

    def crash(plan):
        if plan.launched == crash_at:
            raise Crash

    with crash_contained(), attempts_recorded(record, crash), overflows_injected(record, BAD, frozenset()):
        record.valid_loss = run_on_ranks(config)
    return record


def test_two_ranks_with_other_counts_reach_the_losses_of_one(run_ranks, tmp_path, files):
    fp32 = {"precision": {"dtype": "fp32", "loss_scale": {"rule": "off"}}}
    alone = run(job(tmp_path / "1", files, {}, **fp32))
    both = run_ranks(run, 2, job(tmp_path / "2", files, {}, **fp32))
    assert both[0].samples() == alone.samples()
    rows = zip(metrics_of(tmp_path / "1"), metrics_of(tmp_path / "2"), strict=True)
    for one, two in rows:
        for tag in set(one) & {"train/loss", "valid/loss"}:
            assert one[tag] == pytest.approx(two[tag], rel=1e-5)
    assert both[0].valid_loss == pytest.approx(alone.valid_loss, rel=1e-5)


def test_an_interrupted_run_on_a_staged_mixture_ends_bitwise_as_one_that_never_stopped(tmp_path, files):
    stages = {"stages": [{"from_sample": 40, "train": [{"path": f"{files}/{name}", "weight": 1} for name in "cab"]}]}
    run(job(tmp_path / "straight", files, stages))
    for crash_at in (3, 6, 9):
        run(job(tmp_path / "stopped", files, stages), crash_at)
    run(job(tmp_path / "stopped", files, stages))
    assert differences(end_of(tmp_path / "straight"), end_of(tmp_path / "stopped")) == []


def test_no_batch_is_asked_for_that_the_thread_was_not_told_of_before(tmp_path, files, monkeypatch):
    # Otherwise a step would wait for the disk.
    announced, asked = set(), []
    prefetch, get = BatchLoader.prefetch, BatchLoader.get

    def noted_prefetch(loader, samples):
        announced.add((loader, samples))
        prefetch(loader, samples)

    def noted_get(loader, samples):
        asked.append((loader, samples))
        return get(loader, samples)

    monkeypatch.setattr(BatchLoader, "prefetch", noted_prefetch)
    monkeypatch.setattr(BatchLoader, "get", noted_get)
    run(job(tmp_path, files, {}))
    assert len({loader for loader, _ in asked}) == 2
    assert [one for one in asked if one not in announced] == []


def test_what_was_read_may_not_change_and_what_was_not_may(tmp_path, files):
    def weights(*values):
        return [{"path": f"{files}/{name}", "weight": weight} for name, weight in zip("abc", values, strict=False)]

    later = [{"from_sample": 50, "train": weights(1, 1, 1)}]
    started = {"train": weights(3, 1), "stages": later}
    run(job(tmp_path, files, started), crash_at=5)  # after update 2, saved: cursor 24 or so

    other_mixture = r"data.train: the \d+ samples that were read came from another mixture .* from_sample = \d+ or more"
    refused = [
        ({"train": weights(3, 2)}, other_mixture),
        ({"train": weights(3, 1, 1)}, other_mixture),
        ({"stages": [{"from_sample": 8, "train": weights(1, 1)}]}, other_mixture),
        ({"train": [{"path": f"{files}/a"}, {"path": f"{files}/b"}]}, other_mixture),
        ({"train": weights(3, 1)[::-1]}, other_mixture),
        ({"train": [{"path": f"{files}/c", "weight": 3}, weights(3, 1)[1]]}, r"data.train\[0\]: holds other data"),
        ({"split": [8, 2]}, r"data.split: the checkpoint has \[9.0, 1.0\], the configuration \[8.0, 2.0\]"),
        ({"packing": "none"}, 'data.packing: the checkpoint has "documents", the configuration "none"'),
    ]
    for changed, words in refused:
        with pytest.raises(ConfigError, match=words):
            run(job(tmp_path, files, started | changed))
    other_words = {"train": [weights(6)[0], {"path": f"{files}/./b", "weight": 2}], "split": [0.9, 0.1]}
    run(job(tmp_path, files, other_words | {"stages": [{"from_sample": 48, "train": f"{files}/c"}]}))
    assert metrics_of(tmp_path)[-1]["step"] == 8


def test_every_key_reaches_the_source_it_is_for(tmp_path, files):
    config = job(tmp_path, files, {})
    rows, held_out = training_source(config).read(range(12)), validation_sources(config)[""]
    assert rows.positions is not None
    assert held_out.read(range(12)).positions is not None
    one = {"train": f"{files}/a", "split": None, "packing": "none"}
    never = {"training": {"eval_interval": 0}}
    assert training_source(job(tmp_path, files, one, **never)).read(range(3)).positions is None
    assert validation_sources(job(tmp_path, files, one, **never)) == {}
    three = [{"path": f"{files}/{name}"} for name in "abc"]
    corpus = training_source(job(tmp_path, files, one | {"train": three}, **never))
    parts = [training_source(job(tmp_path, files, one | {"train": [part]}, **never)) for part in three]
    assert corpus.num_windows == sum(part.num_windows for part in parts)  # type: ignore[attr-defined]


def test_all_that_is_wrong_with_the_files_of_a_mixture_is_told_at_once(tmp_path, files):
    train = [{"path": f"{files}/{name}", "weight": 1} for name in ("a", "nowhere", "b")]
    stages = [{"from_sample": 9, "train": [{"path": f"{files}/{name}"} for name in ("gone", "a")]}]
    problems = data_problems(job(tmp_path, files, {"train": [*train, {"markov": 65, "weight": 1}], "stages": stages}))
    wrong = [
        "data.train[1] =",
        "data.stages[0].train[0] =",
        "data.train[3]: got markov = 65,",
        "data.stages[0].train: ",
    ]
    assert [problem.startswith(words) for problem, words in zip(problems, wrong, strict=True)] == [True] * 4
    (problem,) = data_problems(job(tmp_path, files, {"train": f"{files}/a", "split": [1e6, 1]}))
    assert problem.startswith("data.split: leaves 0 tokens of data.train")


def test_a_stage_of_files_that_were_read_as_another_corpus_is_refused(tmp_path, files):
    # A corpus of several files has another order, so windows would come twice before their epoch is over.
    def listed(names, **weight):
        return [{"path": f"{files}/{name}"} | weight for name in names]

    def refused(train, stage):
        return data_problems(job(tmp_path, files, {"train": train, "stages": [{"from_sample": 9, "train": stage}]}))

    for before, after in (("a", "ab"), ("ab", "b"), ("ab", "ba")):
        (problem,) = refused(listed(before), listed(after))
        assert "as part of another corpus than data.train does" in problem
    (problem,) = refused(listed("ab"), listed("ab", weight=1))[:1]
    assert problem.endswith("write the same list in both, or a weight for every file of both")
    assert not refused(listed("ab"), listed("ab"))
    assert not refused(listed("ab"), listed("c"))
    assert not refused(f"{files}/a", listed("ab", weight=1))
    assert not refused(f"{files}/a", f"{files}/./a")  # the same source, not a second one
    config = job(tmp_path, files, {"train": f"{files}/a", "stages": [{"from_sample": 9, "train": f"{files}/./a"}]})
    assert isinstance(training_source(config), TokenFileSource)


def test_two_files_of_one_length_are_read_in_orders_of_their_own_and_a_single_one_as_ever(tmp_path):
    for name in ("a", "b"):
        with TokenFileWriter(tmp_path / name, 6401) as writer:
            writer.add(np.arange(6401))  # each window's tokens tell its place
    plain = {"packing": "none", "split": None}
    never = {"model": {"vocab_size": 6401}, "training": {"eval_interval": 0}}

    def places(*names):
        train = [{"path": f"{tmp_path}/{name}", "weight": 1} for name in names]
        source = training_source(job(tmp_path, tmp_path, plain | {"train": train}, **never))
        return source.read(range(200 * len(names))).tokens[:, 0].tolist()

    both = places("a", "b")
    first, second = both[0::2], both[1::2]
    assert first == places("a")
    assert sorted(first) == sorted(second)
    assert sum(one == other for one, other in zip(first, second, strict=True)) < 10


def test_a_made_up_chain_validates_on_other_samples_than_it_trains_on_whatever_the_seed(tmp_path):
    for seed in (0, 1234):
        config = job(tmp_path, tmp_path, {"train": [{"markov": 4}], "packing": "none"}, training={"seed": seed})
        held_out = validation_sources(config)[""]
        seen = {tuple(row) for row in training_source(config).read(range(500)).tokens.tolist()}
        assert not seen & {tuple(row) for row in held_out.read(range(500)).tokens.tolist()}


def test_a_mixture_survives_the_way_to_toml_and_back(tmp_path, files):
    stages = {"stages": [{"from_sample": 40, "train": [{"path": f"{files}/{name}"} for name in "cab"]}]}
    config = job(tmp_path, files, stages)
    again = config_from_dict(tomllib.loads(config_to_toml(config)))
    assert again == config
    assert [source.path for source in again.data.stages[0].train] == [f"{files}/{name}" for name in "cab"]


def test_losses_are_means_over_the_targets_that_count_of_training_and_of_validation(tmp_path):
    with TokenFileWriter(tmp_path / "pairs", VOCAB) as writer:
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
    config = job(
        tmp_path, tmp_path, {"train": [{"markov": 4}], "split": [1, 1], "packing": "none"},
        precision={"dtype": "fp32", "loss_scale": {"rule": "off"}},
    )  # fmt: skip
    run_on_ranks(config)
    losses = [row["train/loss"] for row in metrics_of(tmp_path) if "train/loss" in row]
    assert losses == pytest.approx(GOLDEN, abs=2e-4)
