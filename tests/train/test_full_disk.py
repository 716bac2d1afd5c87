"""A run whose last checkpoint does not fit on the disk keeps its weights, at its end and on a signal: a new run begins
with them. If they do not fit either, the first error stays.
"""

import errno
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from megamix.base.signals import LeaveRequest
from megamix.checkpoint.folder import CHECKPOINTS, Files
from megamix.comm.topology import Topology
from megamix.hf.source import open_source
from megamix.launch.exit_status import EndedEarlyError
from megamix.launch.run_status import read_status
from megamix.train import ranks
from tests.builders import EXPERTS, tiny_job
from tests.train.recorded import run_recorded

STEPS = 11
MUON = {"optimizer": {"name": "muon"}, "model": {"experts": EXPERTS}}  # several sets of states, and buffers


def _config(folder, data, job, steps=STEPS, **settings):
    return tiny_job(
        folder, job, tokens=data, steps=steps, decay_style="constant", save_interval=4, async_save=False, **settings
    )


def _outcome(config, before=lambda plan: None):
    try:
        run_recorded(config, before=before)
    except EndedEarlyError as error:
        return f"{error.state}: {error}"
    return "finished"


def _on_a_full_disk(config, asked, weights_fail):
    """Run a job whose third save does not fit on the disk, but its weights do.

    `asked`: the second rank gets a signal before the ninth update. `weights_fail`: that rank cannot write the weights.
    """
    request, create = LeaveRequest(), Files.create
    second = Topology.current().dp.rank == 1

    def ask(plan):
        if asked and plan.launched == 8 and second:
            request.ask(signal.SIGTERM)

    def free(files, path):
        saved = Path(config.checkpoint.folder, CHECKPOINTS) / "step_00000008"
        # A save leaves a megabyte free. The weights are a half of Muon's checkpoint, and a third of AdamW's.
        left = (1 << 20) + sum(file.stat().st_size for file in saved.glob("rank_*")) * 3 // 4
        return left if saved.is_dir() else 2**40

    def create_or_fail(files, path):
        if weights_fail and second and "weights_after" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return create(files, path)

    with (
        mock.patch.object(Files, "free_space", free),
        mock.patch.object(Files, "create", create_or_fail),
        mock.patch.object(ranks, "signals_noted", lambda launched: nullcontext(request)),
    ):
        return _outcome(config, ask)


@pytest.mark.parametrize(("job", "asked"), [({}, False), (MUON, True)])
def test_weights_of_a_run_on_a_full_disk_are_kept_and_a_run_begins_with_them(run_ranks, tmp_path, data, job, asked):
    first, second = run_ranks(_on_a_full_disk, 2, _config(tmp_path, data, job), asked, False)
    assert first == second
    status = read_status(tmp_path / "run")
    assert (status.state, status.exit_status) == ("failed", 1)
    update = status.update
    assert (update < STEPS) is asked
    kept = tmp_path / f"run/weights_after_{update}/step_00000000"
    assert first.startswith("failed: the last checkpoint could not be saved: rank 0: OSError: ")
    assert first.endswith(
        f"; only the weights are in {kept}, for the checkpoint.resume of a new run in another folder; "
        f"{update - 8} updates since {tmp_path}/run/checkpoints/step_00000008 are lost"
    )
    assert run_ranks(_outcome, 2, _config(tmp_path / "whole", data, job, steps=update)) == ["finished"] * 2
    whole = load_file(tmp_path / "whole/run/weights.safetensors")
    model = open_source(kept).load(torch.float32, torch.device("cpu"))
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert all(torch.equal(held[name], value) for name, value in whole.items())
    assert _outcome(_config(tmp_path / "new", data, job, steps=3, resume=str(kept))) == "finished"
    assert _outcome(_config(tmp_path, data, job)) == "finished"  # from its newest checkpoint, once there is room


def test_weights_that_do_not_fit_either_leave_the_first_error_and_no_folder(run_ranks, tmp_path, data):
    first, second = run_ranks(_on_a_full_disk, 2, _config(tmp_path, data, {}), False, True)
    assert first == second
    before, _, after = first.partition("; nor could the weights alone: rank 1: OSError: [Errno 28] No space left")
    assert before.startswith("failed: the last checkpoint could not be saved: rank 0: OSError: ")
    assert after.endswith(f"; 3 updates since {tmp_path}/run/checkpoints/step_00000008 are lost")
    assert not [*(tmp_path / "run").glob("weights*")]
