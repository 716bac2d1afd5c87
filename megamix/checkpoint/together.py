"""Work that succeeds on every rank or on none, and whose results all ranks know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megamix.comm.collectives import Collectives, noting
from megamix.comm.host import gather_json, host_collectives
from megamix.comm.topology import Axis


class FailedTogether(OSError):
    """Some rank could not do its part; raised on every rank alike, with every such rank named."""


class Together:
    """Every call must be made by all ranks, in the same order.

    `device`: where the collectives' tensors live. `what`: added to the backend's error, which names no call.
    """

    what = ""

    def __init__(self, collectives: Collectives, device: torch.device):
        self._collectives, self._device = collectives, device
        self.rank, self.size = collectives.axis.rank, collectives.axis.size

    @staticmethod
    def apart(world: Axis, timeout_s: float) -> Together:
        """Over `host_collectives`, for use beside the engine's. Every rank must call it."""
        return Together(host_collectives(world, timeout_s), torch.device("cpu"))

    def every(self, work: Callable[[], Any]) -> list[Any]:
        """Let every rank work; return all the results to all, in rank order. They must be JSON.

        Raises: FailedTogether on every rank if the work raised anything on one.
        """
        cause = None
        try:
            answer = {"result": work()}
        except Exception as error:  # whatever it was, the other ranks wait for this one's answer
            cause, answer = error, {"error": f"{type(error).__name__}: {error}"}
        with noting(self.what):
            answers = gather_json(self._collectives, answer, self._device)
        failures = [f"rank {rank}: {answer['error']}" for rank, answer in enumerate(answers) if "error" in answer]
        if failures:
            raise FailedTogether("; ".join(failures)) from cause
        return [answer["result"] for answer in answers]

    def first(self, work: Callable[[], Any]) -> Any:
        """Let the first rank work; return its result to all. Raises: as `every`."""
        return self.every(work if self.rank == 0 else lambda: None)[0]
