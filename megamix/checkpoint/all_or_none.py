"""Work that succeeds on every rank or on none. All ranks learn its results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megamix.comm.collectives import Collectives, gather_json, noting
from megamix.comm.host import host_collectives
from megamix.comm.topology import Axis


class SomeRankFailed(OSError):
    """The error of every rank if at least one rank could not do its part. The message names each such rank."""


class AllOrNone:
    """Runs work on the ranks and gathers the results. All ranks must make every call, in the same order.

    `device`: the device of the collectives' tensors. `what`: a hint added to the backend's error, which names no call.
    """

    what = ""

    def __init__(self, collectives: Collectives, device: torch.device):
        self._collectives, self._device = collectives, device
        self.rank, self.size = collectives.axis.rank, collectives.axis.size

    @staticmethod
    def apart(world: Axis, timeout_s: float) -> AllOrNone:
        """Return such an object over new `host_collectives`, independent of the engine's collectives. Every rank must
        call it.
        """
        return AllOrNone(host_collectives(world, timeout_s), torch.device("cpu"))

    def every(self, work: Callable[[], Any]) -> list[Any]:
        """Run `work` on every rank. Return all results to all ranks, in rank order. Results must be JSON values.

        Raises: SomeRankFailed on every rank if the work raised an error on one.
        """
        cause = None
        try:
            answer = {"result": work()}
        except Exception as error:  # any error: the other ranks wait for this rank's answer
            cause, answer = error, {"error": f"{type(error).__name__}: {error}"}
        with noting(self.what):
            answers = gather_json(self._collectives, answer, self._device)
        failures = [f"rank {rank}: {answer['error']}" for rank, answer in enumerate(answers) if "error" in answer]
        if failures:
            raise SomeRankFailed("; ".join(failures)) from cause
        return [answer["result"] for answer in answers]

    def first(self, work: Callable[[], Any]) -> Any:
        """Run `work` on the first rank. Return its result to all ranks. Raises: as `every`."""
        return self.every(work if self.rank == 0 else lambda: None)[0]
