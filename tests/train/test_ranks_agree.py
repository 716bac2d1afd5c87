"""Whoever starts the machines of a job by hand: ranks that were started with different data, settings, meshes, versions
or sources all end with status 2, and a message with keys, values and ranks; settings that may differ are not compared;
a silent rank is reported. The line on each key stands in tests/refusals.
"""

import importlib.metadata
import io
import shutil
import threading
import time
from collections import Counter
from contextlib import nullcontext, redirect_stderr
from unittest import mock

import pytest
import torch.distributed as dist

from megamix.cli.verbs import main
from megamix.config import ConfigError
from megamix.data import DISTRIBUTION
from megamix.data.token_file import bin_path
from megamix.launch.exit_status import NoAnswerError
from megamix.launch.liveness import Board, names
from megamix.plugins import SOURCES, Section
from megamix.tools.ranks import DEADLINE_S
from megamix.train import own_code, ranks, ranks_agree
from megamix.train.corpus import JobCorpus
from megamix.train.ranks_agree import RankGroup, check_same_job, differences, started_with
from tests.builders import run_on_ranks, tiny_job, write_data
from tests.conftest import FULL


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Write token files and a tokenizer in `one`, a copy of them in `same`, and one with a changed bit in `other`."""
    base = tmp_path_factory.mktemp("data")
    write_data(base / "one", tokenizer=True)
    for copy in ("same", "other"):
        shutil.copytree(base / "one", base / copy)
    content = bytearray((base / "other/train.bin").read_bytes())
    content[1000] ^= 1
    (base / "other/train.bin").write_bytes(content)
    return base


def _job(folder, data, **settings):
    own = {"vocab_size": 300, "dropout": 0.1, "tokenizer": f"{data}/one/tokenizer.json", "steps": 2}
    return tiny_job(folder, tokens=data / "one", **own | settings)


# Settings of all ranks; other settings of rank 1; the beginning of each line of the message.
DIFFERENT = {
    "data": ({}, {"train": "other/train"}, "content of data.train (SHA-256): "),
    "two keys": (
        {},
        {"num_layers": 3, "decay_style": "linear"},
        'lr_schedule.decay_style: "cosine" on ranks 0, 2, 3; "linear" on rank 1; start all with one ',
        "model.num_layers: 2 on ranks 0, 2, 3; 3 on rank 1; ",
    ),
    "version": ({}, {}, "version of megamix: 0.1.0 on ranks 0, 2, 3; 9.9 on rank 1; install one version on all nodes"),
    "source": ({}, {}, "source code of megamix (SHA-256): "),
}


def _other_code(name, folder):
    """Fake another version of the package in this process, or another byte in one of its files."""
    if name == "version":
        version = importlib.metadata.version
        return mock.patch.object(
            importlib.metadata, "version", lambda package: "9.9" if package == DISTRIBUTION else version(package)
        )
    if name != "source":
        return nullcontext()
    copy = shutil.copytree(own_code.PACKAGE, folder / "megamix")
    with (copy / "model/ops.py").open("a") as file:
        file.write("\n")
    return mock.patch.object(own_code, "PACKAGE", copy)


def _outcome(usual, other, name, folder):
    """Return the error of a job whose rank 1 is started otherwise; empty if it trained."""
    second = dist.get_rank() == 1
    try:
        with _other_code(name if second else "", folder):
            run_on_ranks(other if second else usual)
    except ConfigError as error:
        return list(error.problems)
    return []


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_differ_are_refused_with_key_values_and_ranks(tmp_path, data, run_ranks, name):
    usual, other, *told = DIFFERENT[name]
    mine = {key: f"{data}/{value}" if str(value).startswith("other/") else value for key, value in other.items()}
    jobs = _job(tmp_path, data, **usual), _job(tmp_path, data, **usual | mine)
    problems = run_ranks(_outcome, 4, *jobs, name, tmp_path)
    assert problems == [problems[0]] * 4
    for line, words in zip(problems[0], told, strict=True):
        assert line.startswith(words)
        assert " on ranks 0, 2, 3; " in line
        assert " on rank 1; " in line
    assert not (tmp_path / "run").exists()


def test_what_may_differ_is_not_held_against_ranks(tmp_path, data, run_ranks):
    (tmp_path / "there").mkdir()
    (tmp_path / "here").symlink_to("there")
    files = {"train": f"{data}/same/train", "valid": f"{data}/same/valid", "tokenizer": f"{data}/same/tokenizer.json"}
    other = _job(tmp_path, data, **files, timeout_s=300.0, checkpoint={"folder": str(tmp_path / "there/run")})
    assert run_ranks(_outcome, 2, _job(tmp_path / "here", data), other, "", tmp_path) == [[], []]


def test_a_source_s_own_path_may_be_a_list(data):
    class Paths(Section):
        path: list[str]

    with mock.patch.dict(SOURCES.sections, toy=Paths):
        config = _job(data, data, train=[{"toy": {"path": ["a", "b"]}}])
        assert '"a", "b"' in started_with(config.values, {})["data.train"]


def _count_reads(config):
    with mock.patch.object(ranks_agree, "_read_fingerprints", wraps=ranks_agree._read_fingerprints) as read:
        run_on_ranks(config)
    return read.call_count


def test_the_data_are_read_once_for_all_ranks_of_a_machine(tmp_path, data, run_ranks):
    assert sum(run_ranks(_count_reads, 4, _job(tmp_path, data))) == 1


def _checked(configs, silent=None, store=None):
    """Call `check_same_job` on threads that share a store. Return what each rank returned or raised."""
    store, ended = store or dist.HashStore(), {}

    def check(rank):
        try:
            config = configs[rank]
            corpus, limit_s = JobCorpus(config.data, config.model), config.parallelism.timeout_s
            ended[rank] = check_same_job(started_with(config.values, {}), corpus, store, limit_s, rank, len(configs))
        except BaseException as error:
            ended[rank] = error

    ranks = [rank for rank in range(len(configs)) if rank != silent]
    threads = [threading.Thread(target=check, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    return ended


TIMEOUT_S = 0.7


@pytest.mark.parametrize("silent", [0, 2])
def test_a_rank_that_dies_before_it_reports_ends_the_others_in_time_and_is_named(tmp_path, data, capsys, silent):
    start_s = time.monotonic()
    ended = _checked([_job(tmp_path, data, timeout_s=TIMEOUT_S)] * 4, silent)
    took_s = time.monotonic() - start_s
    assert sorted(ended) == [rank for rank in range(4) if rank != silent]
    for error in ended.values():
        assert isinstance(error, NoAnswerError)
        assert error.exit_status == 1
        assert str(error).startswith(f"no sign of life from rank {silent} within {TIMEOUT_S} s (parallelism.timeout_s)")
    told = capsys.readouterr().err.count("no sign of life")
    assert told == (silent == 0)  # otherwise the first rank's command line says it
    assert took_s < TIMEOUT_S + 2 * Board.grace_s + (1 if FULL else 10)  # another job's load is no hang


def test_a_rank_that_dies_while_it_reads_the_data_for_others_is_named(tmp_path, data):
    with mock.patch.object(ranks_agree, "_read_fingerprints", side_effect=KeyboardInterrupt):
        ended = _checked([_job(tmp_path, data, timeout_s=TIMEOUT_S)] * 4)
    (reader,) = (rank for rank, error in ended.items() if isinstance(error, KeyboardInterrupt))
    del ended[reader]
    assert len(ended) == 3
    assert all(f"from rank {reader} within {TIMEOUT_S} s" in str(error) for error in ended.values()), ended


def test_a_rank_that_cannot_read_its_data_says_so_on_all_ranks(tmp_path, data):
    gone = _job(tmp_path, data, valid=str(tmp_path / "gone"))
    for error in _checked([_job(tmp_path, data), gone, gone]).values():
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


def test_a_rank_makes_a_handful_of_requests_and_the_first_one_more_for_each(tmp_path, data):
    store = _CountingStore()
    ended = _checked([_job(tmp_path, data, seed=rank) for rank in range(24)], store=store)
    assert all(isinstance(end, ConfigError) for end in ended.values())
    first, *others = sorted(store.requests.values(), reverse=True)
    assert max(others) <= 12
    assert first <= 12 + 24


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
    assert len(lines) == 100
    assert lines[0].endswith("; 3 on rank 3; other values on ranks 4 to 999; start all with one configuration")


def test_ranks_are_named_by_their_runs():
    assert names(range(512)) == "ranks 0 to 511"
    assert names([9, 1, 4, 5, 6]) == "ranks 1, 4 to 6, 9"


def _as_torchrun(rank):
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return where | {"WORLD_SIZE": "2", "RANK": str(rank)}


def _ended(job):
    """Return a rank's exit status and what it says, if each has another seed."""
    rank = dist.get_rank()
    with (
        mock.patch.object(ranks, "meet_ranks", lambda device, timeout_s: None),
        mock.patch.object(dist, "destroy_process_group"),
        mock.patch.dict("os.environ", _as_torchrun(rank)),
        redirect_stderr(io.StringIO()) as said,
    ):
        return main(["train", str(job), f"training.seed={rank}"]), said.getvalue()


def test_the_exit_status_is_that_of_wrong_input_and_one_rank_says_why(tmp_path, data, run_ranks):
    job = tmp_path / "job.toml"
    job.write_text(_job(tmp_path, data).text)
    (first, said), (second, repeated) = run_ranks(_ended, 2, job)
    assert (first, second) == (2, 2)
    assert said.count("training.seed: 0 on rank 0; 1 on rank 1; start all with one configuration") == 1
    assert "Traceback" not in said
    assert repeated == ""


def test_a_rank_that_never_comes_is_named_by_one_that_waits(tmp_path, data, monkeypatch, capsys):
    """As where it hangs in a plugin's import."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in (_as_torchrun(1) | {"MASTER_PORT": str(store.port)}).items():
        monkeypatch.setenv(name, value)
    job = tmp_path / "job.toml"
    job.write_text(_job(tmp_path, data, timeout_s=0.5).text)
    assert main(["train", str(job)]) == 1
    said = capsys.readouterr().err
    assert said.count("no sign of rank 0 within 1.5 s: an import (such as a plugin's) or a read of a file") == 1
    assert "Traceback" not in said
