"""A job's average of the weights changes nothing else. It has a loss of its own in each validation, and a file, an
export and an evaluation of its own. A signal within its validation costs nothing, and it may come and go at a resume.
"""

import json
import signal
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from megamix.cli import main
from megamix.hub.source import open_source
from megamix.supervise.status import PreemptedError
from megamix.train.trainer import Trainer
from tests.builders import EXPERTS, run_on_ranks, tiny_job, write_data
from tests.conftest import FULL
from tests.train.outcome import differences, end_of, metrics_of

AVERAGE = {"training": {"average": {"decay": 0.9}}}
LOSS = "valid/average_loss"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder


@pytest.fixture(scope="module")
def averaged(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("averaged")
    run_on_ranks(tiny_job(folder, AVERAGE, valid={"one": f"{data}/valid"}, tokens=data))
    return folder


def test_the_training_is_that_of_a_job_without_it(averaged, data, tmp_path):
    run_on_ranks(tiny_job(tmp_path, valid={"one": f"{data}/valid"}, tokens=data))
    own, plain = metrics_of(averaged), metrics_of(tmp_path)
    validated = [row for row in own if "valid/loss" in row]
    assert [row["step"] for row in validated] == [5, 10, 12]
    for row in validated:
        assert row[LOSS] == row[f"{LOSS}/one"] > 0
        assert row[LOSS] != row["valid/loss"]
    assert [{tag: row[tag] for tag in row if not tag.startswith(LOSS)} for row in own] == plain
    name = "run/weights.safetensors"
    assert (averaged / name).read_bytes() == (tmp_path / name).read_bytes()


def test_an_average_that_keeps_nothing_is_the_weights(data, tmp_path, capsys):
    run_on_ranks(tiny_job(tmp_path, tokens=data, average={"decay": 0.0}, steps=3))
    (row,) = (row for row in metrics_of(tmp_path) if LOSS in row)
    assert row[LOSS] == row["valid/loss"]
    assert f"below ln(vocab_size) | averaged weights {row[LOSS]:.4f}" in capsys.readouterr().out
    names = ("weights.safetensors", "weights_average.safetensors")
    one, other = ((tmp_path / "run" / name).read_bytes() for name in names)
    assert one == other


LAYOUTS = [{"tp_size": 2}, {"pp_size": 2}]
if FULL:
    LAYOUTS += [{"shard": "parameters"}, {"cp_size": 2, "shard": "gradients"}, {"ep_size": 2}]


def _train_in_turn(folder, data):
    for number, layout in enumerate(LAYOUTS):
        model = {"experts": EXPERTS} if "ep_size" in layout else {}
        training = {"average": {"decay": 0.0}, "steps": 3, "eval_interval": 2}
        run_on_ranks(tiny_job(folder / str(number), model=model, training=training, parallelism=layout, tokens=data))


@pytest.mark.uncounted
def test_every_layout_shows_it_whole(run_ranks, data, tmp_path):
    run_ranks(_train_in_turn, 2, tmp_path, data)
    for number, layout in enumerate(LAYOUTS):
        rows = [row for row in metrics_of(tmp_path / str(number)) if LOSS in row]
        assert [row[LOSS] - row["valid/loss"] for row in rows] == [0.0, 0.0], layout
        one, other = (load_file(tmp_path / f"{number}/run/weights{end}.safetensors") for end in ("", "_average"))
        assert all(torch.equal(one[name], other[name]) for name in {**one, **other}), layout


def test_it_is_exported_and_evaluated(averaged, tmp_path, capsys):
    run = str(averaged / "run")
    model = open_source(averaged / "run", average=True).load(torch.float32, torch.device("cpu"))
    written = load_file(averaged / "run/weights_average.safetensors")
    assert all(torch.equal(value, written[name]) for name, value in model.named_parameters())
    assert main(["export", run, "--average", "--to", "hf", str(tmp_path / "hf")]) == 0
    nats = []
    for call in ([run, "--average"], [str(tmp_path / "hf"), "--data", _valid(averaged)], [run]):
        capsys.readouterr()
        assert main(["evaluate", *call, "--dtype", "fp32", "--json", "--max-tokens", "500"]) == 0
        facts = json.loads(capsys.readouterr().out)
        nats.append(facts[0]["nats_per_token"] if isinstance(facts, list) else facts["nats_per_token"])
    assert nats[0] == nats[1] != nats[2]
    assert main(["report", run]) == 0
    page = (averaged / "run/page.html").read_text()
    loss = metrics_of(averaged)[-1][LOSS]
    assert f"<th>that of averaged weights</th><td>{loss:.3f} nats a token at step 12</td>" in page
    for path in (str(tmp_path / "hf"), _without(tmp_path)):
        assert main(["generate", path, "--average"]) == 2
        assert f"--average: {path}" in capsys.readouterr().err


def _valid(averaged):
    (valid,) = open_source(averaged / "run").valid.values()
    return valid


def _without(folder):
    write_data(folder / "data")
    run_on_ranks(tiny_job(folder, steps=2))
    return str(folder / "run")


def test_a_signal_within_its_validation_costs_nothing(averaged, data, tmp_path):
    config = tiny_job(tmp_path, AVERAGE, valid={"one": f"{data}/valid"}, tokens=data)
    calls, asked = 0, Trainer._leave_if_asked

    def in_the_second(trainer, leave):
        nonlocal calls
        calls += 1
        if calls == 4:  # before the last of two batches of the average
            leave.ask(signal.SIGTERM)
        asked(trainer, leave)

    with mock.patch.object(Trainer, "_leave_if_asked", in_the_second), pytest.raises(PreemptedError):
        run_on_ranks(config)  # its save compares half weights and masters
    assert calls == 4
    assert not any("valid/loss" in row for row in metrics_of(tmp_path))
    run_on_ranks(config)
    assert differences(end_of(tmp_path), end_of(averaged)) == []


def test_it_may_come_and_go(data, tmp_path, capsys, caplog):
    def run(steps, **training):
        capsys.readouterr()
        caplog.clear()
        run_on_ranks(tiny_job(tmp_path, tokens=data, training={"steps": steps, **training}))
        return capsys.readouterr().out

    run(2)
    told = run(4, average={"decay": 0.5})
    assert "changed since: training.average.decay: not set -> 0.5" in told
    assert "the average of the weights starts from the masters: the checkpoint has none" in caplog.messages
    assert LOSS in metrics_of(tmp_path)[-1]
    told = run(5)
    assert "changed since: training.average.decay: 0.5 -> not set" in told
    assert "the average of the weights is dropped: none is kept from now on" in caplog.messages
    assert LOSS not in metrics_of(tmp_path)[-1]
