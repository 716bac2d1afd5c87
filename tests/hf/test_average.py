"""The mean of checkpoints of one model is that of the masters and biases in FP64, rounded once, from any layouts and
dtypes; it evaluates and begins runs, and other models are refused by what differs. A model from a checkpoint has its
biases.
"""

import shutil
from pathlib import Path

import pytest
import torch

from megamix.checkpoint.boxes import Box
from megamix.checkpoint.folder import checkpoints
from megamix.checkpoint.verify import verify_checkpoint
from megamix.cli.verbs import main
from megamix.hf.source import open_source
from tests.builders import EXPERTS, run_on_ranks, tiny_job


def _job(folder, data, **own):
    shared = {"model": {"experts": EXPERTS}, "training": {"steps": 4, "eval_interval": 0}}
    return tiny_job(folder, shared, tokens=data, decay_style="constant", precision_interval=0, **own)


def _tensors(checkpoint):
    found = verify_checkpoint(checkpoint)
    of = [(name, state, shape) for name, state, shape, _ in found.manifest.tensors() if state in ("master", "buffer")]
    return {name: found.gather(name, state, Box.whole(shape)) for name, state, shape in of}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, data, run_ranks):
    """Train one model three times: in FP16 alone, in BF16 with divided experts, and in FP16 with divided layers."""
    folder = tmp_path_factory.mktemp("runs")
    run_on_ranks(_job(folder / "a", data))
    run_ranks(run_on_ranks, 2, _job(folder / "b", data, dtype="bf16", expert={"size": 2}, seed=5))
    run_ranks(run_on_ranks, 2, _job(folder / "c", data, pipeline={"size": 2}, shard="gradients"))
    return [folder / name / "run" for name in "abc"]


def test_the_mean_is_that_of_masters_and_biases_rounded_once(runs, tmp_path, capsys):
    output = tmp_path / "mean"
    assert main(["checkpoint", "average", *map(str, runs), "--output", str(output)]) == 0
    (mean,) = checkpoints(output / "checkpoints")
    newest = [checkpoints(run / "checkpoints")[0] for run in runs]
    assert capsys.readouterr().out == f"{mean}: the mean of {', '.join(map(str, newest))}\n"
    parts, got = [_tensors(path) for path in newest], _tensors(mean)
    (bias,) = (value for name, value in got.items() if name.endswith("balance.value"))
    assert bias.abs().max() > 0
    assert got.keys() == parts[0].keys()
    for name, value in got.items():
        want = torch.stack([part[name] for part in parts]).double().mean(0)
        assert value.dtype == torch.float32
        assert torch.all((value.double() - want).abs() <= want.abs() * 2.0**-24 + 2.0**-150), name


def test_of_one_checkpoint_twice_it_evaluates_as_the_checkpoint_and_begins_a_run(runs, data, tmp_path, capsys):
    newest = checkpoints(runs[0] / "checkpoints")[0]
    assert main(["checkpoint", "average", str(newest), str(newest), "--output", str(tmp_path / "mean")]) == 0
    capsys.readouterr()
    told = []
    for path in (runs[0], tmp_path / "mean"):
        assert main(["evaluate", str(path), "--max-tokens", "500"]) == 0
        told.append(capsys.readouterr().out.partition(" in fp16 ")[2])
    assert told[0] == told[1] != ""
    model = open_source(tmp_path / "mean").load(torch.float32, torch.device("cpu"))
    one = _tensors(newest)
    assert all(torch.equal(buffer, one.get(name, buffer)) for name, buffer in model.named_buffers())
    run_on_ranks(_job(tmp_path, data, resume=str(checkpoints(tmp_path / "mean/checkpoints")[0])))
    assert "begins with the weights of" in capsys.readouterr().out


def test_other_models_are_refused_by_what_differs(runs, data, tmp_path, capsys):
    run_on_ranks(_job(tmp_path, data, model={"experts": {**EXPERTS, "top_k": 1}, "rope": {"theta": 500.0}}, steps=2))
    capsys.readouterr()

    def refused(status, told, *others, output=tmp_path / "mean"):
        assert main(["checkpoint", "average", *map(str, (runs[0], *others)), "--output", str(output)]) == status
        error = capsys.readouterr().err
        assert told in error
        return error

    error = refused(2, "are of different models: ", tmp_path / "run")
    assert "model.rope: { theta = 10000.0 } and { theta = 500.0 }" in error
    assert "{ top_k = 1 }" in error
    within = runs[0] / "checkpoints" / "mean"
    refused(2, f"--output: got {within}, lies among the checkpoints", runs[1], output=within)
    hurt = checkpoints(Path(shutil.copytree(runs[1], tmp_path / "hurt")) / "checkpoints")[0]
    file = hurt / "rank_00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x55")
    refused(1, "its checksum is not that", hurt)
    assert not (tmp_path / "mean").exists()
