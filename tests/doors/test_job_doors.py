"""A job with a plugin's loss-scale rule, source, reader, metric and tracker on two ranks, stopped and started again,
ends bitwise as an uninterrupted one, logs included; a tracker that fails ends no run.
"""

import importlib
import json
import logging
import sys

import pytest

from megamix.base.progress import ProgressLine
from megamix.data.prepare.corpus import input_corpus
from megamix.data.prepare.plan import make_plan, read_piece
from megamix.data.token_file import TokenFile
from megamix.tools.verify.layouts.observe import batches
from tests.builders import corpus_of, run_on_ranks, tiny_job
from tests.data.prepare_job import prepare
from tests.train.outcome import TIMELESS, end_of

PLUGINS = [f"tests.doors.{kind}_plugin" for kind in ("loss_scale", "source", "reader", "metric", "tracker")]
VOCAB = 300
DOCUMENTS = [f"text {number} of a corpus, and what it says: {number * 7919}\n" * 3 for number in range(60)]


@pytest.fixture(autouse=True)
def imported(doors):
    for name in PLUGINS:
        importlib.import_module(name)
    yield
    sys.modules["tests.doors.metric_plugin"].HOOK.remove()
    for name in PLUGINS:
        del sys.modules[name]


def _job(folder, data, steps, **notebook):
    counting = {"counting": {"stride": 2}}
    return tiny_job(
        folder,
        plugins=PLUGINS,
        vocab_size=VOCAB,
        recompute="selective",
        train=[counting | {"weight": 1.0}, {"path": str(data / "train"), "weight": 3.0}],
        valid=[counting],
        loss_scale={"rule": "stairs", "init_scale": 2.0**14, "patience": 1},
        training={"steps": steps, "eval_interval": 4},
        decay_style="constant",
        save_interval=4,
        metrics={"log_interval": 1, "precision_interval": 0, "notebook": notebook},
    )


def _run(config):
    """On a rank whose next job is another one."""
    for name in PLUGINS:
        importlib.import_module(name)
    try:
        run_on_ranks(config)
    finally:
        sys.modules["tests.doors.metric_plugin"].HOOK.remove()
        del sys.modules["tests.doors.metric_plugin"]


def _lines(folder, name="metrics"):
    return [json.loads(line) for line in (folder / f"run/{name}.jsonl").read_text().splitlines()]


def _rows(folder):
    rows = [row for row in _lines(folder) if "run/resumed" not in row]
    own = (*TIMELESS, "ffn/", "norm/", "overflowed/", "step")
    return [{tag: value for tag, value in row.items() if tag.startswith(own)} for row in rows]


@pytest.fixture
def data(tmp_path):
    """Token files, by two workers, of what the plugin reads."""
    source = tmp_path / "corpus"
    source.mkdir()
    (source / "a.dashed").write_text("\n---\n".join(DOCUMENTS))
    prepare(source, tmp_path / "data", 2)
    return tmp_path / "data"


def test_a_job_of_plugins_goes_on_bitwise(run_ranks, data, tmp_path):
    assert sum(TokenFile(data / name).num_documents for name in ("train", "valid")) == len(DOCUMENTS)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder, steps in ((whole, 8), (parts, 4), (parts, 8)):
        run_ranks(_run, 2, _job(folder, data, steps))
    one, other = end_of(whole), end_of(parts)
    assert [key for key in one if one[key] != other[key]] == []
    assert _rows(whole) == _rows(parts)

    applied = [row for row in _rows(whole) if "train/loss" in row]
    assert [row["step"] for row in applied] == [*range(1, 9)]
    for row in applied:
        assert 0 < row["ffn/rms"] < row["ffn/peak"]
        assert row["ffn/tokens"] == 8 * 32 * 2  # samples, their tokens, layers
        assert row["norm/calls"] == 4 * 5  # micro-batches, norms
    overflows = [row for row in _rows(whole) if "overflowed/ffn/rms" in row]
    assert len(overflows) == applied[-1]["optim/skipped_steps"] > 0
    scales = [row["optim/loss_scale"] for row in _rows(whole) if "optim/loss_scale" in row]
    assert scales[:3] == [2.0**14, 2.0**15, 2.0**16]

    told, written, own = _lines(whole, "notebook"), _lines(whole), ("step", "time/unix_s")
    assert (told[0], told[-1]) == (["config", 8], ["closed"])
    numbers = [{tag: value for tag, value in row.items() if tag not in own and value is not None} for row in written]
    assert told[1:-1] == [[row["step"], values] for row, values in zip(written, numbers, strict=True)]
    ends = [row for row in _lines(parts, "notebook") if len(row) == 1 or row[0] == "config"]
    assert ends == [["config", 4], ["closed"], ["config", 8], ["closed"]]


def test_a_tracker_that_fails_ends_no_run(data, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "megamix"):
        run_on_ranks(_job(tmp_path, data, 3, fails_at=2))
    told = [record.getMessage() for record in caplog.records if record.getMessage().startswith("tracker")]
    assert told[0].startswith("tracker notebook: ConnectionError: no network; the run goes on")
    assert [row["step"] for row in _rows(tmp_path) if "train/loss" in row] == [1, 2, 3]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (
            {"train": [{"counting": {"stride": 64}}], "valid": [{"counting": {}}]},
            "data.train: counting.stride must be below model.vocab_size = 64, got 64",
        ),
        (
            {"train": [{"counting": {}}], "valid": None, "split": [9, 1]},
            "data.split: divides token files by their documents, and data.train is a source of its own; leave split "
            "out, and write what to validate on as data.valid",
        ),
    ],
)
def test_what_a_source_cannot_is_refused_before_a_job_starts(tmp_path, data, problem):
    assert corpus_of(tiny_job(tmp_path, plugins=PLUGINS, data=data)).problems() == [problem]


@pytest.fixture
def counting(monkeypatch):
    """The plugin's source, which has a length here."""
    source = sys.modules["tests.doors.source_plugin"].Counting
    monkeypatch.setattr(source, "__len__", lambda self: 0, raising=False)
    return source


def test_a_source_validates_on_other_samples_than_it_trains_on_and_may_have_a_length(tmp_path, counting):
    config = tiny_job(tmp_path, plugins=PLUGINS, train=[{"counting": {}}], valid=[{"counting": {}}], seed=0)
    source, held_out = corpus_of(config).training(0), corpus_of(config).validation()[""]
    assert isinstance(source, counting)
    assert (source.read(range(9)).tokens != held_out.read(range(9)).tokens).any()
    assert [*corpus_of(config).fingerprints()] == ["data.train", "data.valid"]


def test_verify_and_audit_read_a_source_of_its_own_and_no_file(tmp_path, counting):
    train = [{"path": "nowhere", "weight": 1.0}, {"counting": {"stride": 2}, "weight": 1.0}]
    config = tiny_job(tmp_path, plugins=PLUGINS, train=train, seed=0)
    for batch in batches(config, 0, 0):
        steps = (batch.targets - batch.tokens) % config.model.vocab_size
        assert {*steps.flatten().tolist()} <= {1, 2}


def test_a_reader_gives_its_documents_in_order(tmp_path):
    (tmp_path / "a.dashed").write_text("\n---\n".join(["one", "two", "three"]))
    plan = make_plan(input_corpus([str(tmp_path)]), ProgressLine())
    assert [record for piece in plan.pieces for *_, record in read_piece(piece)] == ["one", "two", "three"]
