"""Work that succeeds on every rank or on none, and whose results all ranks know."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megamix.comm.collectives import Collectives


class FailedTogether(OSError):
    """Some rank could not do its part; raised on every rank alike, with every such rank named."""


class Together:
    """Every call must be made by all ranks, in the same order.

    `device`: where the collectives' tensors live.
    """

    def __init__(self, collectives: Collectives, device: torch.device):
        self._collectives, self._device = collectives, device
        self.rank, self.size = collectives.topology.dp_rank, collectives.topology.dp_size

    def every(self, work: Callable[[], Any]) -> list[Any]:
        """Every rank works; all get all the results, in rank order. They must be JSON.

        Raises: FailedTogether on every rank if the work raised anything on one.
        """
        cause = None
        try:
            answer = {"result": work()}
        except Exception as error:  # whatever it was, the other ranks wait for this one's answer
            cause, answer = error, {"error": f"{type(error).__name__}: {error}"}
        answers = [json.loads(text) for text in self._texts(json.dumps(answer))]
        failures = [f"rank {rank}: {answer['error']}" for rank, answer in enumerate(answers) if "error" in answer]
        if failures:
            raise FailedTogether("; ".join(failures)) from cause
        return [answer["result"] for answer in answers]

    def first(self, work: Callable[[], Any]) -> Any:
        """The first rank works; all get its result. Raises: as `every`."""
        return self.every(work if self.rank == 0 else lambda: None)[0]

    def _texts(self, text: str) -> list[str]:
        """Every rank's text, in rank order."""
        row = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        longest = int(self._table(torch.tensor([row.numel()])).max())
        padded = torch.full((longest,), ord(" "), dtype=torch.uint8)
        padded[: row.numel()] = row
        return [bytes(line.tolist()).decode() for line in self._table(padded)]

    def _table(self, row: Tensor) -> Tensor:
        return self._collectives.table(row.to(self._device)).cpu()
