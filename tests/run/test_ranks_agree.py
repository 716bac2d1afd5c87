"""Whoever starts the machines of a job by hand: ranks that were started with different data, settings, meshes, versions
or sources all end with status 2, and a message with keys, values and ranks; settings that may differ are not compared;
a silent rank is reported.
"""

import importlib.metadata
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from megamix.builders.data import data_fingerprints
from megamix.config import ConfigError, config_to_toml
from megamix.data import DISTRIBUTION
from megamix.data.token_file import bin_path
from megamix.plugins import SOURCES, Section
from megamix.run import own_code, ranks_agree
from megamix.run.ranks_agree import RankGroup, check_same_job, differences
from megamix.supervise.liveness import Board, names
from megamix.supervise.status import NoAnswerError
from megamix.tools.ranks import DEADLINE_S
from tests.builders import run_on_ranks, tiny_job, write_data
from tests.conftest import FULL
from tests.programs import with_settings

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Write token files and a tokenizer in `one`, a copy of them in `same`, and files with a changed bit in `other`."""
    base = tmp_path_factory.mktemp("data")
    write_data(base / "one", tokenizer=True)
    shutil.copytree(base / "one", base / "same")
    shutil.copytree(base / "one", base / "other")
    for name in ("train", "valid"):
        content = bytearray((base / "other" / f"{name}.bin").read_bytes())
        content[1000] ^= 1
        (base / "other" / f"{name}.bin").write_bytes(content)
    with (base / "other/tokenizer.json").open("a") as file:
        file.write("\n")
    return base


def _job(folder, data, *overrides):
    own = {
        "model": {"vocab_size": 300, "dropout": 0.1},
        "data": {"tokenizer": str(data / "one/tokenizer.json")},
        "training": {"steps": 2},
        "metrics": {"tensorboard": False},
    }
    return tiny_job(folder, own, *overrides, tokens=data / "one")


def _in_other(name):
    key, file = ("tokenizer", "tokenizer.json") if name == "tokenizer" else (name, name)
    return lambda data: {"data": {key: str(data / "other" / file)}}


class Paths(Section):
    """A source's."""

    path: list[str]


# Settings of all ranks; further settings of rank 1; words of the message.
SPLIT = {"data": {"valid": None, "split": [80, 20]}}
DIFFERENT = {
    "data": ({}, _in_other("train"), "content of data.train (SHA-256): "),
    "validation data": ({}, _in_other("valid"), "content of data.valid (SHA-256): "),
    "validation sets": (
        {"data": {"valid": {"a": [{"markov": 4}]}}},
        {"data": {"valid": {"a": [{"markov": 4}], "b": [{"markov": 4}]}}},
        "data.valid: { a = [{ markov = 4 }] } on ranks 0, 2, 3; { a = [{ markov = 4 }], b = [{ markov = 4 }] } on rank",
    ),
    "tokenizer": ({}, _in_other("tokenizer"), "content of data.tokenizer (SHA-256): "),
    "split": (
        SPLIT,
        {"data": {"split": [90, 10]}},
        "data.split: [80.0, 20.0] on ranks 0, 2, 3; [90.0, 10.0] on rank 1; ",
    ),
    "seed": ({}, {"training": {"seed": 7}}, "training.seed: 1234 on ranks 0, 2, 3; 7 on rank 1; start all with one "),
    "dropout": ({}, {"model": {"dropout": 0.0}}, "model.dropout: 0.1 on ranks 0, 2, 3; 0.0 on rank 1; "),
    "heads": ({}, {"model": {"num_heads": 4}}, "model.num_heads: 2 on ranks 0, 2, 3; 4 on rank 1; "),
    "lr": ({}, {"optimizer": {"lr": 0.02}}, "optimizer.lr: 0.01 on ranks 0, 2, 3; 0.02 on rank 1; "),
    "schedule": (
        {},
        {"lr_schedule": {"decay_style": "linear"}},
        'lr_schedule.decay_style: "cosine" on ranks 0, 2, 3; "linear" on rank 1; ',
    ),
    "dtype": ({}, {"precision": {"dtype": "bf16"}}, 'precision.dtype: "fp16" on ranks 0, 2, 3; "bf16" on rank 1; '),
    "batch": (
        {},
        {"training": {"global_batch_size": 16}},
        "training.global_batch_size: 8 on ranks 0, 2, 3; 16 on rank 1; ",
    ),
    "tp_size": ({}, {"parallelism": {"tp_size": 2}}, "parallelism.tp_size: 1 on ranks 0, 2, 3; 2 on rank 1; "),
    "pp_size": ({}, {"parallelism": {"pp_size": 2}}, "parallelism.pp_size: 1 on ranks 0, 2, 3; 2 on rank 1; "),
    "version": ({}, {}, "version of megamix: 0.1.0 on ranks 0, 2, 3; 9.9 on rank 1; install one version on all nodes"),
    "source": ({}, {}, "source code of megamix (SHA-256): "),
}


@contextmanager
def _other_code(name, folder):
    """Fake another version of the package in this process, or another byte in one of its files."""
    version = importlib.metadata.version
    if name == "version":
        with mock.patch.object(
            importlib.metadata, "version", lambda package: "9.9" if package == DISTRIBUTION else version(package)
        ):
            yield
    elif name == "source":
        copy = shutil.copytree(own_code.PACKAGE, folder / "megamix")
        with (copy / "model/ops.py").open("a") as file:
            file.write("\n")
        with mock.patch.object(own_code, "PACKAGE", copy):
            yield
    else:
        yield


def _outcome(usual, other, name, folder):
    """Return the error of a job whose rank 1 is started otherwise; empty if it trained."""
    rank = dist.get_rank()
    try:
        if rank == 1:
            with _other_code(name, folder):
                run_on_ranks(other)
        else:
            run_on_ranks(usual)
    except ConfigError as error:
        return list(error.problems)
    return []


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_differ_are_refused_with_key_values_and_ranks(tmp_path, data, run_ranks, name):
    base, other, said = DIFFERENT[name]
    mine = other(data) if callable(other) else other
    problems = run_ranks(_outcome, 4, _job(tmp_path, data, base), _job(tmp_path, data, base, mine), name, tmp_path)
    assert problems == [problems[0]] * 4
    (line,) = problems[0]
    assert line.startswith(said)
    assert " on ranks 0, 2, 3; " in line
    assert " on rank 1; " in line
    assert not (tmp_path / "run").exists()


def test_all_that_differs_is_said_at_once(tmp_path, data, run_ranks):
    usual, other = _job(tmp_path, data), _job(tmp_path, data, {"training": {"seed": 7}, "model": {"num_layers": 3}})
    first, second = run_ranks(_outcome, 2, usual, other, "", tmp_path)
    assert first == second
    assert [line.partition(":")[0] for line in first] == ["model.num_layers", "training.seed"]


def test_what_may_differ_is_not_held_against_ranks(tmp_path, data, run_ranks):
    (tmp_path / "there").mkdir()
    (tmp_path / "here").symlink_to("there")
    files = {"train": str(data / "same/train"), "valid": str(data / "same/valid")}
    other = {
        "data": files | {"tokenizer": str(data / "same/tokenizer.json")},
        "parallelism": {"timeout_s": 300.0},
        "checkpoint": {"folder": str(tmp_path / "there/run")},
    }
    assert run_ranks(_outcome, 2, _job(tmp_path / "here", data), _job(tmp_path, data, other), "", tmp_path) == [[], []]


def test_a_source_that_comes_again_is_one_by_its_path_whatever_that_is(data):
    def stages(later):
        usual = _job(data, data, {"data": {"stages": [{"from_sample": 8, "train": later}]}})
        return ranks_agree.started_with(usual, {})

    again, a_copy = stages(str(data / "one/train")), stages(str(data / "same/train"))
    assert again["data.stages"] != a_copy["data.stages"]  # the first goes on where it was, the other begins anew
    assert not any(str(data) in value for value in again.values())
    assert set(ranks_agree.MAY_DIFFER) & set(again) == set()


def test_a_tokenizer_on_some_ranks_alone_is_told(data):
    with_one, without = _job(data, data), _job(data, data, {"data": {"tokenizer": None}})
    groups = [
        RankGroup([n], ranks_agree.started_with(it, data_fingerprints(it))) for n, it in enumerate((with_one, without))
    ]
    (line,) = differences(groups)
    assert line.startswith("content of data.tokenizer (SHA-256): ")
    assert line.endswith(" on rank 0; not set on rank 1; give all ranks the same files")


def test_a_source_s_own_path_may_be_a_list(data):
    with mock.patch.dict(SOURCES.sections, toy=Paths):
        config = _job(data, data, {"data": {"train": [{"toy": {"path": ["a", "b"]}}]}})
        assert '"a", "b"' in ranks_agree.started_with(config, {})["data.train"]


def _count_reads(config):
    fingerprints, reads = ranks_agree.data_fingerprints, []

    def counted(config):
        reads.append(config)
        return fingerprints(config)

    with mock.patch.object(ranks_agree, "data_fingerprints", counted):
        run_on_ranks(config)
    return len(reads)


def test_the_data_are_read_once_for_all_ranks_of_a_machine(tmp_path, data, run_ranks):
    assert sum(run_ranks(_count_reads, 4, _job(tmp_path, data))) == 1


MESHES = {
    2: [{}, {"tp_size": 2}, {"pp_size": 2}],
    4: [{"tp_size": 2, "pp_size": 2}, {}, {"tp_size": 2}, {"pp_size": 2}],
}


@pytest.mark.parametrize(("ranks", "starts"), [(2, 50 if FULL else 3), (4, 50 if FULL else 1)])
def test_ranks_that_are_started_alike_train(tmp_path, data, run_ranks, ranks, starts):
    for number in range(starts):
        mesh = MESHES[ranks][number % len(MESHES[ranks])]
        config = _job(
            tmp_path / str(number), data, {"parallelism": mesh, "model": {"vocab_size": 320, "dropout": 0.0}},
            {"data": {"tokenizer": None}},  # a sample of text takes longer than all else
        )  # fmt: skip
        assert run_ranks(_outcome, ranks, config, config, "", tmp_path) == [[]] * ranks, mesh


class _Ranks:
    """`check_same_job` on threads that share a store, and its results rank by rank."""

    def __init__(self, size, configs, silent=(), store=None):
        self.store = store or dist.HashStore()
        self.ended = {}
        self.start_s = time.monotonic()
        given = configs if isinstance(configs, list) else [configs] * size
        threads = [
            threading.Thread(target=self._check, args=(given[rank], rank, size), daemon=True)
            for rank in range(size)
            if rank not in silent
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        self.took_s = time.monotonic() - self.start_s

    def _check(self, config, rank, size):
        try:
            self.ended[rank] = check_same_job(config, self.store, rank, size)
        except Exception as error:
            self.ended[rank] = error


TIMEOUT_S = 0.7


def _limited(folder, data, timeout_s=TIMEOUT_S):
    return _job(folder, data, {"parallelism": {"timeout_s": timeout_s}})


@pytest.mark.parametrize("silent", [0, 2])
def test_a_rank_that_dies_before_it_reports_ends_the_others_in_time_and_is_named(tmp_path, data, capsys, silent):
    ranks = _Ranks(4, _limited(tmp_path, data), silent=(silent,))
    assert sorted(ranks.ended) == [rank for rank in range(4) if rank != silent]
    for error in ranks.ended.values():
        assert isinstance(error, NoAnswerError)
        assert error.exit_status == 1
        assert str(error).startswith(f"no sign of life from rank {silent} within {TIMEOUT_S} s (parallelism.timeout_s)")
    assert capsys.readouterr().err.count("no sign of life") == (
        silent == 0
    )  # otherwise the first rank's command line says it
    assert ranks.took_s < TIMEOUT_S + 2 * Board.grace_s + (1 if FULL else 10)  # another job's load is no hang


def test_a_rank_that_dies_while_it_reads_the_data_for_others_is_named(tmp_path, data):
    class Died(BaseException):
        pass

    readers = []

    def die(config):
        readers.append(threading.current_thread())
        raise Died

    def check_until_death(ranks, config, rank, size):
        try:
            check(ranks, config, rank, size)
        except Died:
            readers.append(rank)

    check = _Ranks._check
    with (
        mock.patch.object(ranks_agree, "_read_fingerprints", die),
        mock.patch.object(_Ranks, "_check", check_until_death),
    ):
        ranks = _Ranks(4, _limited(tmp_path, data))
    _, reader = readers
    assert sorted([*ranks.ended, reader]) == [0, 1, 2, 3]
    assert all(f"from rank {reader} within {TIMEOUT_S} s" in str(error) for error in ranks.ended.values()), ranks.ended


def test_a_rank_that_cannot_read_its_data_says_so_on_all_ranks(tmp_path, data):
    gone = _job(tmp_path, data, {"data": {"valid": str(tmp_path / "gone")}})
    ranks = _Ranks(3, [_job(tmp_path, data), gone, gone])
    for error in ranks.ended.values():
        assert isinstance(error, ConfigError)
        (line,) = error.problems
        assert line == f"ranks 1, 2: [Errno 2] No such file or directory: '{bin_path(tmp_path / 'gone')}'"


class _CountingStore:
    """Store that counts each thread's requests."""

    def __init__(self):
        self._store, self.requests = dist.HashStore(), Counter()

    def __getattr__(self, name):
        self.requests[threading.get_ident()] += 1
        return getattr(self._store, name)


@pytest.mark.parametrize("alike", [True, False])
def test_a_rank_makes_a_handful_of_requests_and_the_first_one_two_more_for_each(tmp_path, data, alike):
    configs = [_job(tmp_path, data, {"training": {"seed": 0 if alike else rank}}) for rank in range(24)]
    ranks = _Ranks(24, configs, store=_CountingStore())
    assert all(isinstance(end, ranks_agree.KnownData if alike else ConfigError) for end in ranks.ended.values())
    first, *others = sorted(ranks.store.requests.values(), reverse=True)
    assert max(others) <= 12
    assert first <= 12 + (1 if alike else 2) * 24


def test_many_ranks_and_long_values_make_short_lines():
    long = ["x" * 5000 + end for end in ("one", "other")]
    groups = [
        RankGroup(list(range(0, 4096, 2)), {"a": "1", "b": long[0], "c": "1"}),
        RankGroup(list(range(1, 4095, 2)), {"a": "2", "b": long[1], "c": "1"}),
        RankGroup([4095], {"a": "not set", "b": long[1], "c": "1"}),
    ]
    a, b = differences(groups)
    assert a == (
        "a: 1 on ranks 0, 2, 4, 6, 8, 10, 12, 14 and 2040 more; 2 on ranks 1, 3, 5, 7, 9, 11, 13, 15 and 2039 more; "
        "not set on rank 4095; start all with one configuration"
    )
    assert "xone on ranks 0" in b
    assert "xother on ranks 1" in b
    assert len(b) < 250
    each_its_own = [RankGroup([rank], {f"key{n:03d}": str(rank) for n in range(100)}) for rank in range(1000)]
    lines = differences(each_its_own)
    assert len(lines) == 41
    assert lines[0].endswith("; 3 on rank 3; other values on ranks 4 to 999; start all with one configuration")
    assert lines[-1] == "and 60 more keys differ"


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3], "rank 3"),
        ([0, 2, 3], "ranks 0, 2, 3"),
        (range(512), "ranks 0 to 511"),
        ([9, 1, 4, 5, 6], "ranks 1, 4 to 6, 9"),
    ],
)
def test_ranks_are_named_by_their_runs(ranks, words):
    assert names(ranks) == words


_RANK_MAIN = """
import os, sys
from megamix.cli import main
seed = ["training.seed=7"] if os.environ["RANK"] == "1" else []
sys.exit(main(["train", sys.argv[1], *seed]))
"""


def test_under_torchrun_the_exit_status_is_that_of_wrong_input(tmp_path, data):
    (tmp_path / "job.toml").write_text(config_to_toml(_job(tmp_path, data)))
    (tmp_path / "rank.py").write_text(_RANK_MAIN)
    launch = ["-m", "megamix.supervise.launch", "--standalone", "--nproc-per-node=2", str(tmp_path / "rank.py")]
    ended = subprocess.run(
        [sys.executable, *launch, str(tmp_path / "job.toml")],
        cwd=ROOT, env=with_settings(OMP_NUM_THREADS=1, PYTHONPATH=ROOT), capture_output=True, text=True,
        timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert ended.returncode == 2, ended.stderr
    said = "training.seed: 1234 on rank 0; 7 on rank 1; start all with one configuration"
    assert ended.stderr.count(said) == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "run").exists()


def test_a_rank_that_hangs_in_a_plugin_s_import_is_named_by_one_that_waits(tmp_path, data):
    hangs = 'import os, time\nif os.environ["RANK"] == "0":\n    time.sleep(600)\n'
    (tmp_path / "hanging_plugin.py").write_text(hangs)
    text = config_to_toml(_job(tmp_path, data, {"parallelism": {"timeout_s": 2.0}}))
    (tmp_path / "job.toml").write_text(text.replace("plugins = []", 'plugins = ["hanging_plugin"]'))
    launch = ["-m", "megamix.supervise.launch", "--standalone", "--nproc-per-node=2", "-m", "megamix", "train"]
    ended = subprocess.run(
        [sys.executable, *launch, str(tmp_path / "job.toml")],
        cwd=tmp_path, env=with_settings(OMP_NUM_THREADS=1, PYTHONPATH=ROOT), capture_output=True, text=True,
        timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert ended.returncode == 1, ended.stderr
    said = "no sign of rank 0 within 3 s: an import (such as a plugin's) or a read of a file may hang there"
    assert ended.stderr.count(said) == 1, ended.stderr
    assert "Traceback" not in ended.stderr
