"""Weights that are NaN or inf are told by tensor: one of them makes every loss and every text of the model NaN."""

from __future__ import annotations

import logging
from typing import Protocol

import torch
from torch import Tensor

from megamix.checkpoint.boxes import Box

log = logging.getLogger("megamix")
ALLOW = "--allow-non-finite"
_TOLD = 8  # tensors in a message


class Weights(Protocol):
    """All parameters of a model on the disk, by our names, a piece at a time."""

    def read(self, param: str, box: Box) -> Tensor:
        """FP32, of the box's size."""
        ...

    def where(self, param: str, place: tuple[int, ...]) -> str:
        """A place of a parameter as the files name it."""
        ...


class WatchedWeights:
    """Weights, with a count of those that are not finite among what was read."""

    def __init__(self, weights: Weights):
        self._weights = weights
        self._found: dict[str, tuple[int, str]] = {}  # by parameter: how many, and the first one in words

    def read(self, param: str, box: Box) -> Tensor:
        values = self._weights.read(param, box)
        wrong = ~torch.isfinite(values)
        if count := int(wrong.sum()):
            place = tuple(wrong.nonzero()[0].tolist())
            there = tuple(start + step for start, step in zip(box.offset, place, strict=True))
            first = f"{float(values[place])} at {self._weights.where(param, there)}"
            before, first = self._found.get(param, (0, first))
            self._found[param] = before + count, first
        return values

    def where(self, param: str, place: tuple[int, ...]) -> str:
        return self._weights.where(param, place)

    def judge(self, allow: bool) -> None:
        """After all is read. Raises: ValueError with the tensors' names, unless the user has allowed it."""
        if not self._found:
            return
        lines = [f"{count:,}, the first {first}" for count, first in self._found.values()]
        more = f"; and {len(lines) - _TOLD} more parameters" if len(lines) > _TOLD else ""
        told = f"weights that are not finite: {'; '.join(lines[:_TOLD])}{more}"
        if not allow:
            raise ValueError(f"{told}; the model is damaged: get it anew, or take it as it is with {ALLOW}")
        log.warning(told)
