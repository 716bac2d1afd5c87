"""The mean of checkpoints of one model is that of the masters and biases in FP64, rounded once, from any layouts and
dtypes; it evaluates, exports and begins runs, and other models are refused by what differs. A model from a checkpoint
has its biases.
"""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megamix.checkpoint.boxes import Box
from megamix.checkpoint.folder import checkpoints
from megamix.checkpoint.verify import BoxReader, verify_checkpoint
from megamix.cli import main
from megamix.hub.convert import import_model
from megamix.hub.hugging_face import WEIGHTS
from megamix.hub.source import open_source
from tests.builders import EXPERTS, run_on_ranks, tiny_job
from tests.hub.folders import LLAMA, write_hugging_face


def _job(folder, data, *layers, **own):
    shared = {
        "model": {"experts": EXPERTS, "num_layers": 2},
        "training": {"steps": 4, "eval_interval": 0},
        "lr_schedule": {"decay_style": "constant"},
        "metrics": {"precision_interval": 0},
    }
    return tiny_job(folder, shared, *layers, tokens=data, **own)


def _tensors(checkpoint):
    found = verify_checkpoint(checkpoint)
    reader = BoxReader(found)
    of = [(name, state, shape) for name, state, shape, _ in found.manifest.tensors() if state in ("master", "buffer")]
    return {name: reader.gather(name, state, Box.whole(shape)) for name, state, shape in of}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, data, run_ranks):
    """Train one model three times: in FP16 alone, in BF16 with divided experts, and in FP16 with divided layers."""
    folder = tmp_path_factory.mktemp("runs")
    bf16 = {"precision": {"dtype": "bf16"}}
    run_on_ranks(_job(folder / "a", data))
    run_ranks(run_on_ranks, 2, _job(folder / "b", data, bf16, parallelism={"ep_size": 2}, training={"seed": 5}))
    run_ranks(run_on_ranks, 2, _job(folder / "c", data, parallelism={"pp_size": 2, "shard": "gradients"}))
    return [folder / name / "run" for name in "abc"]


def test_the_mean_is_that_of_masters_and_biases_rounded_once(runs, tmp_path, capsys):
    output = tmp_path / "mean"
    assert main(["checkpoint", "average", *map(str, runs), "--output", str(output)]) == 0
    (mean,) = checkpoints(output / "checkpoints")
    newest = [checkpoints(run / "checkpoints")[0] for run in runs]
    assert capsys.readouterr().out == f"{mean}: the mean of {', '.join(map(str, newest))}\n"
    parts, got = [_tensors(path) for path in newest], _tensors(mean)
    biases = [name for name in got if name.endswith("balance.value")]
    assert len(biases) == 1
    assert got[biases[0]].abs().max() > 0
    assert got.keys() == parts[0].keys()
    for name, value in got.items():
        want = torch.stack([part[name] for part in parts]).double().mean(0)
        assert value.dtype == torch.float32
        assert torch.all((value.double() - want).abs() <= want.abs() * 2.0**-24 + 2.0**-150), name


def test_of_one_checkpoint_twice_it_is_the_checkpoint_and_evaluates_alike(runs, data, tmp_path, capsys):
    newest = checkpoints(runs[0] / "checkpoints")[0]
    assert main(["checkpoint", "average", str(newest), str(newest), "--output", str(tmp_path / "mean")]) == 0
    one, mean = _tensors(newest), _tensors(checkpoints(tmp_path / "mean/checkpoints")[0])
    assert [name for name in one if not torch.equal(one[name], mean[name])] == []
    capsys.readouterr()
    told = []
    for path in (runs[0], tmp_path / "mean"):
        model = open_source(path).load(torch.float32, torch.device("cpu"))
        for name, buffer in model.named_buffers():
            assert name not in one or torch.equal(buffer, one[name])
        assert main(["evaluate", str(path), "--max-tokens", "500"]) == 0
        told.append(capsys.readouterr().out.partition(" in fp16 ")[2])
    assert told[0] == told[1] != ""
    resumed = _job(tmp_path, data, checkpoint={"resume": str(checkpoints(tmp_path / "mean/checkpoints")[0])})
    run_on_ranks(resumed)
    assert "begins with the weights of" in capsys.readouterr().out


def test_other_models_are_refused_by_what_differs(runs, data, tmp_path, capsys):
    other = _job(tmp_path, data, model={"experts": {**EXPERTS, "top_k": 1}, "rope_theta": 500.0}, training={"steps": 2})
    run_on_ranks(other)
    output = ["--output", str(tmp_path / "mean")]
    capsys.readouterr()
    assert main(["checkpoint", "average", str(runs[0]), str(tmp_path / "run"), *output]) == 2
    told = capsys.readouterr().err
    assert "are of different models: " in told
    assert "model.rope_theta: 10000.0 and 500.0" in told
    assert "'top_k': 1" in told
    assert main(["checkpoint", "average", str(runs[0]), *output]) == 2
    assert "got 1 checkpoint, a mean needs two or more; name more" in capsys.readouterr().err
    within = str(runs[0] / "checkpoints" / "mean")
    assert main(["checkpoint", "average", str(runs[0]), str(runs[1]), "--output", within]) == 2
    assert f"--output: got {within}, lies among the checkpoints" in capsys.readouterr().err
    hurt = Path(shutil.copytree(runs[1], tmp_path / "hurt"))
    file = checkpoints(hurt / "checkpoints")[0] / "rank_00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x55")
    assert main(["checkpoint", "average", str(runs[0]), str(checkpoints(hurt / "checkpoints")[0]), *output]) == 1
    assert "its checksum is not that" in capsys.readouterr().err
    assert not (tmp_path / "mean").exists()


def test_imported_weights_are_averaged_and_exported(tmp_path):
    halves = []
    for number in range(2):
        folder = tmp_path / f"hf{number}"
        write_hugging_face(LLAMA, folder)
        halves.append({name: value * (1 + 0.3 * number) for name, value in load_file(folder / WEIGHTS).items()})
        save_file(halves[-1], folder / WEIGHTS)
        import_model(folder, tmp_path / f"in{number}")
    parts = [str(tmp_path / "in0"), str(tmp_path / "in1")]
    assert main(["checkpoint", "average", *parts, "--output", str(tmp_path / "mean")]) == 0
    assert main(["export", str(tmp_path / "mean"), "--to", "hf", str(tmp_path / "out")]) == 0
    got = load_file(tmp_path / "out" / WEIGHTS)
    assert got.keys() == halves[0].keys()
    for name, value in got.items():
        assert torch.equal(value, ((halves[0][name].double() + halves[1][name].double()) / 2).float()), name
