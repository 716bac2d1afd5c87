"""`megamix checkpoint export --to dcp`: torch loads the saved state, whatever ranks saved it."""

from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from megamix import NAG
from megamix.checkpoint import boxes, verify
from megamix.checkpoint.export_dcp import export_dcp
from megamix.checkpoint.verify import verify_checkpoint
from megamix.cli.verbs import main
from tests.builders import make_model
from tests.checkpoint.faults import listing
from tests.checkpoint.state import fill, fp16_engine, full_value, save_now, save_steps

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # by dcp.load: that it is one process


@pytest.fixture(scope="module")
def ready(run_ranks, tmp_path_factory):
    """Save the checkpoint of step 3 by two ranks."""
    folder = tmp_path_factory.mktemp("ready") / "checkpoints"
    run_ranks(save_steps, 2, folder, [3])
    return folder / "step_00000003"


def _want(name, state, like):
    return full_value(name, state, tuple(like.shape), 3)


def test_torch_loads_model_and_optimizer_as_they_were_saved(ready, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(boxes, "_LARGEST_SUB_BOX", 100)  # so that a parameter is several chunks
    output = tmp_path / "new" / "out"
    run = ready.parents[1]  # a run stands for its newest checkpoint
    assert main(["checkpoint", "export", str(run), "--to", "dcp", str(output)]) == 0
    assert capsys.readouterr().out.startswith(f"{output}: step 3, ")
    assert listing(output.parent) == ["out"]

    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    saved = get_optimizer_state_dict(model, optimizer)
    weights = model.state_dict()
    assert "head.weight" in weights  # tied: the embedding's second name
    dcp.load({"model": weights, "optimizer": {"state": saved["state"]}}, checkpoint_id=output)
    model.load_state_dict(weights)
    set_optimizer_state_dict(model, optimizer, saved)
    for name, param in model.named_parameters():
        assert torch.equal(param, _want(name, "master", param)), name
        state = optimizer.state[param]
        assert sorted(state) == ["exp_avg", "exp_avg_sq", "step"]
        assert state["step"] == 3
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[key], _want(name, key, param)), (key, name)


def test_torch_s_converter_finds_the_nested_names(ready, tmp_path):
    export_dcp(verify_checkpoint(ready), tmp_path / "out")
    dcp_to_torch_save(tmp_path / "out", tmp_path / "out.pt")
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert sorted(loaded["model"]) == sorted(make_model().state_dict())
    state = loaded["optimizer"]["state"]["blocks.1.up.weight"]
    assert torch.equal(state["exp_avg"], _want("blocks.1.up.weight", "exp_avg", state["exp_avg"]))


def test_a_scalar_and_another_optimizer_go_the_same_way(tmp_path):
    model = nn.Module()
    model.gain = nn.Parameter(torch.ones(()))
    engine = fp16_engine(model=model, optimizer=NAG(lr=0.1))
    fill(engine, 3)
    export_dcp(verify_checkpoint(save_now(tmp_path / "checkpoints", engine)), tmp_path / "out")
    gain, momentum = torch.zeros(2)
    state = {"gain": {"momentum_buffer": momentum}}
    dcp.load({"model": {"gain": gain}, "optimizer": {"state": state}}, checkpoint_id=tmp_path / "out")
    assert torch.equal(gain, full_value("gain", "master", (), 3))
    assert torch.equal(momentum, full_value("gain", "momentum_buffer", (), 3))


def test_what_cannot_be_written_leaves_nothing(ready, tmp_path, monkeypatch):
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(verify.Checkpoint, "read", full)
    with pytest.raises(OSError, match=r"out cannot be written: .*No space left on device"):
        export_dcp(verify_checkpoint(ready), tmp_path / "out")
    assert listing(tmp_path) == []
