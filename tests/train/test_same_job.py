"""Ranks that were not started alike end before they train, all of them, and are told what differs and on which ranks."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from megamix.config import Config, ConfigError, config_to_toml
from megamix.data.token_file import bin_path
from megamix.train import same_job, started_with
from megamix.train.differences import Group, differences, names
from megamix.train.same_job import NoAnswerError, check_same_job
from tests.conftest import FULL
from tests.ranks import DEADLINE_S
from tests.train.jobs import VOCAB, run_on_ranks, tiny_job, write_data

ROOT = Path(__file__).resolve().parents[2]

Overrides = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Token files and a tokenizer in `one`, a copy of them in `same`, and one with a bit changed in each in `other`."""
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


def _job(folder: Path, data: Path, *overrides: Overrides) -> Config:
    sections: Overrides = {
        "model": {"vocab_size": 300, "dropout": 0.1},
        "data": {
            "train": str(data / "one/train"),
            "valid": str(data / "one/valid"),
            "tokenizer": str(data / "one/tokenizer.json"),
        },
        "training": {"steps": 2},
        "metrics": {"tensorboard": False},
    }
    for override in overrides:
        sections = {
            section: sections.get(section, {}) | override.get(section, {}) for section in {*sections, *override}
        }
    return tiny_job(folder, **sections)


def _in_other(name: str) -> Callable[[Path], Overrides]:
    key, file = ("tokenizer", "tokenizer.json") if name == "tokenizer" else (name, name)
    return lambda data: {"data": {key: str(data / "other" / file)}}


# What all ranks have; what rank 1 has beside it; what is said of it.
SPLIT = {"data": {"valid": None, "split": [80, 20]}}
DIFFERENT: dict[str, tuple[Overrides, Overrides | Callable[[Path], Overrides], str]] = {
    "data": ({}, _in_other("train"), "content of data.train (SHA-256): "),
    "validation data": ({}, _in_other("valid"), "content of data.valid (SHA-256): "),
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
def _other_code(name: str, folder: Path) -> Iterator[None]:
    """Another version of the package in this process, or another byte in one of its files."""
    version = importlib.metadata.version
    if name == "version":
        with mock.patch.object(
            importlib.metadata, "version", lambda package: "9.9" if package == "megamix" else version(package)
        ):
            yield
    elif name == "source":
        copy = shutil.copytree(started_with.PACKAGE, folder / "megamix")
        with (copy / "model/ops.py").open("a") as file:
            file.write("\n")
        with mock.patch.object(started_with, "PACKAGE", copy):
            yield
    else:
        yield


def _outcome(usual: Config, other: Config, name: str, folder: Path) -> list[str]:
    """Of a job whose rank 1 is started otherwise; empty if it trained."""
    rank = dist.get_rank()
    try:
        if rank == 1:
            with _other_code(name, folder):
                run_on_ranks(other)
        else:
            run_on_ranks(usual)
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_differ_are_refused_with_key_values_and_ranks(tmp_path, data, run_ranks, name: str) -> None:
    base, other, said = DIFFERENT[name]
    mine = other(data) if callable(other) else other
    problems = run_ranks(_outcome, 4, _job(tmp_path, data, base), _job(tmp_path, data, base, mine), name, tmp_path)
    assert problems == [problems[0]] * 4
    (line,) = problems[0]
    assert line.startswith(said)
    assert " on ranks 0, 2, 3; " in line
    assert " on rank 1; " in line
    assert not (tmp_path / "run").exists()


def test_all_that_differs_is_said_at_once(tmp_path, data, run_ranks) -> None:
    usual, other = _job(tmp_path, data), _job(tmp_path, data, {"training": {"seed": 7}, "model": {"num_layers": 3}})
    first, second = run_ranks(_outcome, 2, usual, other, "", tmp_path)
    assert first == second
    assert [line.partition(":")[0] for line in first] == ["model.num_layers", "training.seed"]


def test_what_may_differ_is_not_held_against_ranks(tmp_path, data, run_ranks) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "here").symlink_to("there")
    files = {"train": str(data / "same/train"), "valid": str(data / "same/valid")}
    other = {
        "data": files | {"tokenizer": str(data / "same/tokenizer.json")},
        "parallelism": {"timeout_s": 300.0},
        "checkpoint": {"folder": str(tmp_path / "there/run")},
    }
    assert run_ranks(_outcome, 2, _job(tmp_path / "here", data), _job(tmp_path, data, other), "", tmp_path) == [[], []]


def test_a_source_that_comes_again_is_one_by_its_path_whatever_that_is(data) -> None:
    def stages(later: str) -> dict[str, str]:
        usual = _job(data, data, {"data": {"stages": [{"from_sample": 8, "train": later}]}})
        return started_with.started_with(usual, {})

    again, a_copy = stages(str(data / "one/train")), stages(str(data / "same/train"))
    assert again["data.stages"] != a_copy["data.stages"]  # the first goes on where it was, the other begins anew
    assert not any(str(data) in value for value in again.values())
    assert set(started_with.MAY_DIFFER) & set(again) == set()


def _count_reads(config: Config) -> int:
    fingerprints, reads = same_job.data_fingerprints, []

    def counted(config: Config) -> dict[str, str]:
        reads.append(config)
        return fingerprints(config)

    with mock.patch.object(same_job, "data_fingerprints", counted):
        run_on_ranks(config)
    return len(reads)


def test_the_data_are_read_once_for_all_ranks_of_a_machine(tmp_path, data, run_ranks) -> None:
    assert sum(run_ranks(_count_reads, 4, _job(tmp_path, data))) == 1


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_are_started_alike_train(tmp_path, data, run_ranks, ranks: int) -> None:
    meshes = [{}, {"tp_size": 2}, {"pp_size": 2}] + ([{"tp_size": 2, "pp_size": 2}] if ranks == 4 else [])
    for number in range(50 if FULL else len(meshes)):
        mesh = meshes[number % len(meshes)]
        config = _job(
            tmp_path / str(number), data, {"parallelism": mesh}, {"model": {"vocab_size": 320, "dropout": 0.0}}
        )
        assert run_ranks(_outcome, ranks, config, config, "", tmp_path) == [[]] * ranks, mesh
