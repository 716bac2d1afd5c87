"""Each validation set has a loss of its own, that of all its samples on any ranks, told by its name; a start may bring
other sets. A job's average of the weights changes nothing else. It has a loss of its own in each validation, and a
file, an export and an evaluation of its own. A signal within its validation costs nothing.
"""

import contextlib
import io
import json
import signal
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from megamix.cli.verbs import main
from megamix.hf.source import open_source
from megamix.launch.exit_status import PreemptedError
from megamix.train.batches import RankBatches, Validation
from megamix.train.engine import build_training
from megamix.train.objects import build_loader
from megamix.train.trainer import Trainer
from tests.builders import EXPERTS, SEQ_LEN, corpus_of, run_on_ranks, tiny_job
from tests.conftest import FULL
from tests.train.outcome import differences, end_of, metrics_of

CPU = torch.device("cpu")
SAMPLES = 16  # of one set in a validation of `_sets`: two batches of eight


def _sets(folder, data, **layout):
    """Return a job with a set of one file, one of a mixture, and the part that data.split holds out. Documents are
    packed, so that samples have other numbers of targets.
    """
    sets = {"one": f"{data}/valid", "mix_2": [{"path": f"{data}/valid", "weight": 3}, {"markov": 7, "weight": 1}]}
    wide = {"init_std": 0.1}  # samples' losses lie further apart than those of a model that knows nothing
    packed = {"valid": sets, "split": [9, 1], "packing": "documents"}
    return tiny_job(folder, tokens=data, model=wide, dtype="fp32", loss_scale={"rule": "off"}, **packed, **layout)


def _loader(config, source):
    return build_loader(config.parallelism, source, CPU, packed=corpus_of(config).packed)


def _in_one_pass(config):
    """Return each set's loss, by one forward over its samples in one process."""
    model = build_training(config, CPU).engine.module.eval()
    sums = {}
    with torch.no_grad():
        for name, source in corpus_of(config).validation().items():
            with _loader(config, source) as loader:
                batch = loader.get(range(SAMPLES))
            sums[name] = torch.tensor([float(model(*batch.inputs)), batch.weight], dtype=torch.float64)
    sums[""] = torch.stack([*sums.values()]).sum(0)
    return {name: float(loss / weight) for name, (loss, weight) in sums.items()}


def _validated(configs):
    """Return the losses of each job's first weights."""
    told = []
    for config in configs:
        with ExitStack() as files:
            runner, training = build_training(config, CPU), config.training
            sets = {
                name: RankBatches(
                    files.enter_context(_loader(config, source)), runner.engine.topology, training.micro_batch_size
                )
                for name, source in corpus_of(config).validation().items()
            }
            validation = Validation(runner, sets, training.global_batch_size, training.eval_batches)
            told.append(validation.losses(lambda: None))
    return told


def test_each_set_s_loss_on_two_ranks_is_that_of_one_pass_over_its_samples(run_ranks, tmp_path, data):
    layouts = [{}, {"context": {"size": 2}}, {"pipeline": {"size": 2}}, {"tensor": {"size": 2}}]
    want = _in_one_pass(_sets(tmp_path, data))
    assert want.keys() == {"", "one", "mix_2", "split"}
    # All round FP32 sums of at most SAMPLES * SEQ_LEN losses, in other orders: each addition by up to 2^-24 of the sum.
    bound = SAMPLES * SEQ_LEN * 2.0**-24
    for told in run_ranks(_validated, 2, [_sets(tmp_path, data, **layout) for layout in layouts]):
        for layout, losses in zip(layouts, told, strict=True):
            assert losses == pytest.approx(want, rel=bound), layout


def test_the_losses_of_sets_are_told_by_name_wherever_the_loss_is(tmp_path, data, capsys):
    sets = {"code": f"{data}/valid", "web-1": f"{data}/train"}
    run_on_ranks(tiny_job(tmp_path, valid=sets, steps=5, tokens=data))
    out, last = capsys.readouterr().out, metrics_of(tmp_path)[-1]
    code, web = last["valid/loss/code"], last["valid/loss/web-1"]
    assert last["valid/loss"] == pytest.approx((code + web) / 2, rel=1e-12)  # both sets have as many targets
    assert f"valid loss {last['valid/loss']:.4f}, " in out
    assert f"\n  code {code:.4f}, web-1 {web:.4f}\n" in out
    run = str(tmp_path / "run")
    assert main(["report", run]) == 0
    page = (tmp_path / "run/page.html").read_text()
    assert f"<th>validation loss, web-1</th><td>{web:.3f} nats a token at step 5</td>" in page
    capsys.readouterr()
    assert main(["evaluate", run, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [(one["set"], one["data"]) for one in facts] == [*sets.items()]
    assert main(["evaluate", run, "--max-tokens", "99"]) == 0
    assert f"on web-1, {data}/train: 98 tokens" in capsys.readouterr().out


def test_a_run_goes_on_with_other_sets(tmp_path, data, capsys):
    run_on_ranks(tiny_job(tmp_path, steps=2, tokens=data))
    assert metrics_of(tmp_path)[-1].keys() & {"valid/loss", "valid/loss/web"} == {"valid/loss"}
    capsys.readouterr()
    run_on_ranks(tiny_job(tmp_path, valid={"web": f"{data}/valid"}, steps=3, tokens=data))
    assert "changed since: data.valid: [{ path = " in capsys.readouterr().out
    last = metrics_of(tmp_path)[-1]
    assert last["valid/loss"] == last["valid/loss/web"]


def test_split_divides_the_training_files_alone(tmp_path, data):
    config = _sets(tmp_path, data)
    assert corpus_of(config).problems() == []
    assert corpus_of(config).fingerprints().keys() == {"data.train", "data.valid.one", "data.valid.mix_2[0]"}
    undivided = tiny_job(tmp_path, packing="documents", tokens=data)
    whole, one = corpus_of(undivided).validation()[""], corpus_of(config).validation()["one"]
    assert (whole.read(range(150)).tokens == one.read(range(150)).tokens).all()
    short = tiny_job(tmp_path, valid={"one": f"{data}/valid"}, split=[1, 10**6], tokens=data)
    assert [problem.split(" tokens of ")[1][:10] for problem in corpus_of(short).problems()] == ["data.train"]


LOSS = "valid/average_loss"


def _job(folder, data, **settings):
    return tiny_job(folder, tokens=data, valid={"one": f"{data}/valid"}, **settings)


@pytest.fixture(scope="module")
def averaged(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("averaged")
    run_on_ranks(_job(folder, data, average={"decay": 0.9}))
    return folder


def test_the_training_is_that_of_a_job_without_it(averaged, data, tmp_path):
    run_on_ranks(_job(tmp_path, data))
    own, plain = metrics_of(averaged), metrics_of(tmp_path)
    validated = [row for row in own if "valid/loss" in row]
    assert [row["step"] for row in validated] == [5, 10, 12]
    for row in validated:
        assert row[LOSS] == row[f"{LOSS}/one"] > 0
        assert row[LOSS] != row["valid/loss"]
    assert [{tag: row[tag] for tag in row if not tag.startswith(LOSS)} for row in own] == plain
    name = "run/weights.safetensors"
    assert (averaged / name).read_bytes() == (tmp_path / name).read_bytes()


def _said(config):
    with contextlib.redirect_stdout(io.StringIO()) as said:
        run_on_ranks(config)
    return said.getvalue()


LAYOUTS = [{}, {"tensor": {"size": 2}}, {"pipeline": {"size": 2}}]
if FULL:
    LAYOUTS += [{"shard": "parameters"}, {"context": {"size": 2}, "shard": "gradients"}]
    LAYOUTS += [{"expert": {"size": 2}, "experts": EXPERTS}]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_average_that_keeps_nothing_is_the_weights_in_every_layout(run_ranks, data, tmp_path, layout):
    config = tiny_job(tmp_path, tokens=data, average={"decay": 0.0}, steps=3, eval_interval=2, **layout)
    said, _ = run_ranks(_said, 2, config)
    losses = [(row[LOSS], row["valid/loss"]) for row in metrics_of(tmp_path) if LOSS in row]
    assert [mine == plain for mine, plain in losses] == [True, True]
    assert f"below ln(vocab_size) | averaged weights {losses[-1][0]:.4f}" in said
    weights, average = (load_file(tmp_path / f"run/weights{end}.safetensors") for end in ("", "_average"))
    assert weights.keys() == average.keys()
    assert all(torch.equal(weights[name], average[name]) for name in weights)


def test_it_is_exported_and_evaluated(averaged, data, tmp_path, capsys):
    run, exported = str(averaged / "run"), str(tmp_path / "hf")
    model = open_source(averaged / "run", average=True).load(torch.float32, CPU)
    written = load_file(averaged / "run/weights_average.safetensors")
    assert all(torch.equal(value, written[name]) for name, value in model.named_parameters())
    assert main(["export", run, "--average", "--to", "hf", exported]) == 0
    nats = []
    for call in ([run, "--average"], [exported, "--data", f"{data}/valid"], [run]):
        capsys.readouterr()
        assert main(["evaluate", *call, "--dtype", "fp32", "--json", "--max-tokens", "500"]) == 0
        facts = json.loads(capsys.readouterr().out)
        nats.append((facts[0] if isinstance(facts, list) else facts)["nats_per_token"])
    assert nats[0] == nats[1] != nats[2]
    assert main(["report", run]) == 0
    page = (averaged / "run/page.html").read_text()
    loss = metrics_of(averaged)[-1][LOSS]
    assert f"<th>that of averaged weights</th><td>{loss:.3f} nats a token at step 12</td>" in page
    run_on_ranks(_job(tmp_path, data, steps=2))
    for without in (exported, str(tmp_path / "run")):
        assert main(["generate", without, "--average"]) == 2
        assert f"--average: {without}" in capsys.readouterr().err


def test_a_signal_within_its_validation_costs_nothing(averaged, data, tmp_path):
    config = _job(tmp_path, data, average={"decay": 0.9})
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
