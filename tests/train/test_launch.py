"""torchrun's ranks end with a status; so does the launcher, with the same one."""

from __future__ import annotations

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megamix.train import launch


@pytest.mark.parametrize(("exit_code", "status"), [(3, 3), (2, 2), (1, 1), (-9, 1)])
def test_the_first_failure_decides_the_status(monkeypatch, exit_code: int, status: int) -> None:
    def fail(arguments: list[str]) -> None:
        assert arguments == ["--standalone", "job"]
        failures = {
            rank: ProcessFailure(local_rank=rank, pid=rank, exitcode=code, error_file="")
            for rank, code in ((0, -15), (1, exit_code))
        }
        failures[0].timestamp, failures[1].timestamp = 2, 1
        raise ChildFailedError("megamix", failures)

    monkeypatch.setattr(launch, "main", fail)
    assert launch.launch(["--standalone", "job"]) == status


def test_ranks_that_end_well_end_well(monkeypatch) -> None:
    monkeypatch.setattr(launch, "main", lambda arguments: None)
    assert launch.launch([]) == 0
