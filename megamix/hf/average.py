"""The mean of several checkpoints of one model, as a folder that is like an imported one."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megamix.base.progress import ProgressLine
from megamix.checkpoint.boxes import Box
from megamix.checkpoint.folder import CHECKPOINTS, new_folder
from megamix.config.diff import diff
from megamix.hf.convert import write_checkpoint
from megamix.hf.source import Source, Weights
from megamix.train.resume_rules import meaning_of_model


class MeanWeights:
    """The mean of the weights of several models: a sum in FP64 and one rounding to FP32."""

    def __init__(self, weights: Sequence[Weights]):
        self._weights = weights

    def read(self, param: str, box: Box) -> Tensor:
        total = torch.zeros(box.size, dtype=torch.float64)
        for weights in self._weights:
            total += weights.read(param, box)
        return (total / len(self._weights)).float()

    def where(self, param: str, place: tuple[int, ...]) -> str:
        return self._weights[0].where(param, place)


def average(sources: Sequence[Source], output: Path, progress: ProgressLine) -> str:
    """Write `output`, whole or not at all, with the mean of the masters and biases, and the configuration of the first
    model. Return the path of the checkpoint in it. Memory holds a few boxes of 16 MiB at a time.

    Raises: ValueError if they are no checkpoints or not of one model, naming what differs; if a weight is not finite;
    if `output` exists or lies among the checkpoints; OSError.
    """
    first = sources[0]
    for source in sources:
        if source.text is None:
            raise ValueError(f"{source.path} is no checkpoint; import it first, and give that folder")
        if output.resolve().is_relative_to(source.path.resolve().parent):
            raise ValueError(f"--output: got {output}, lies among the checkpoints of a run; write another folder")
        one, other = ({**meaning_of_model(each.config), "biases": each.buffers} for each in (first, source))
        if changes := diff(one, other):
            differing = "; ".join(f"model.{name}: {theirs} and {its}" for name, theirs, its in changes)
            raise ValueError(f"{first.path} and {source.path} are of different models: {differing}")
    mean = MeanWeights([source.weights for source in sources])
    with new_folder(output, "--output") as aside:
        name = write_checkpoint(
            aside / CHECKPOINTS, first.config, mean, first.text or "", progress, buffers=first.buffers
        )
    return str(output / CHECKPOINTS / name)
