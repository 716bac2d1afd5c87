"""Each validation set has a loss of its own, that of all its samples on any ranks, told by its name; a start may bring
other sets.
"""

import json
from contextlib import ExitStack
from unittest import mock

import pytest
import torch

from megamix.builders.data import data_fingerprints, data_problems, validation_sources
from megamix.builders.objects import build_loader, build_training
from megamix.cli import main
from megamix.train.batches import Validation
from tests.builders import SEQ_LEN, run_on_ranks, tiny_job, write_data
from tests.train.outcome import metrics_of

CPU = torch.device("cpu")
SAMPLES = 16  # of one set in a validation of `_sets`: two batches of eight
Losses = dict[str, float]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder


def _sets(folder, data, **layout):
    """Return a job with a set of one file, one of a mixture, and the part that data.split holds out. Documents are
    packed, so that samples have other numbers of targets.
    """
    mixture = [{"path": f"{data}/valid", "weight": 3}, {"markov": 7, "weight": 1}]
    sets = {"one": f"{data}/valid", "mix_2": mixture}
    wide = {"init_std": 0.1}  # samples' losses lie further apart than those of a model that knows nothing
    return tiny_job(
        folder, model=wide, train=f"{data}/train", valid=sets, split=[9, 1], packing="documents",
        dtype="fp32", loss_scale={"rule": "off"}, parallelism=layout, tokens=data,
    )  # fmt: skip


def _in_one_pass(config):
    """Return each set's loss, by one forward over its samples in one process."""
    model = build_training(config, CPU).engine.module.eval()
    sums = {}
    with torch.no_grad():
        for name, source in validation_sources(config).items():
            with build_loader(config, source, CPU) as loader:
                batch = loader.get(range(SAMPLES))
            sums[name] = torch.tensor([float(model(*batch.inputs)), batch.weight], dtype=torch.float64)
    sums[""] = torch.stack([*sums.values()]).sum(0)
    return {name: float(loss / weight) for name, (loss, weight) in sums.items()}


def _validated(configs):
    """Return the losses of each job's first weights, and those that a judge of the first rank's part would report."""
    told = []
    for config in configs:
        runner = build_training(config, CPU)
        with ExitStack() as files:
            sources = validation_sources(config)
            loaders = {name: files.enter_context(build_loader(config, it, CPU)) for name, it in sources.items()}
            validation = Validation(config, runner, loaders)
            right, world = validation.losses(lambda: None), runner.engine.world
            table = world.table
            with mock.patch.object(world, "table", lambda row, table=table: table(row)[:1]):
                told.append((right, validation.losses(lambda: None)))
    return told


def test_each_set_s_loss_on_two_ranks_is_that_of_one_pass_over_its_samples(run_ranks, tmp_path, data):
    layouts = [{}, {"cp_size": 2}, {"pp_size": 2}, {"tp_size": 2}]
    want = _in_one_pass(_sets(tmp_path, data))
    assert want.keys() == {"", "one", "mix_2", "split"}
    # All round FP32 sums of at most SAMPLES * SEQ_LEN losses, in other orders: each addition by up to 2^-24 of the sum.
    bound = SAMPLES * SEQ_LEN * 2.0**-24
    by_rank = run_ranks(_validated, 2, [_sets(tmp_path, data, **layout) for layout in layouts])
    for told in by_rank:
        for layout, (got, of_first_rank) in zip(layouts, told, strict=True):
            assert got == pytest.approx(want, rel=bound), layout
            if "tp_size" in layout:
                continue  # the first rank's part is all of it
            for name, loss in of_first_rank.items():
                assert loss != pytest.approx(want[name], rel=bound), f"{layout}: {name}"


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
    assert data_problems(config) == []
    assert data_fingerprints(config).keys() == {"data.train", "data.valid.one", "data.valid.mix_2[0]"}
    undivided = tiny_job(tmp_path, packing="documents", tokens=data)
    whole, one = validation_sources(undivided)[""], validation_sources(config)["one"]
    assert (whole.read(range(150)).tokens == one.read(range(150)).tokens).all()
    short = tiny_job(tmp_path, valid={"one": f"{data}/valid"}, split=[1, 10**6], tokens=data)
    assert [problem.split(" tokens of ")[1][:10] for problem in data_problems(short)] == ["data.train"]
