"""The same step on one rank: no buckets, no shards, no collectives, FP64 throughout. And once more in the layout's own
precision, by the plain model alone, to know how far rounding takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megamix.config import Config
from megamix.mixed_precision.optimizers import MASTER, Optimizer, UpdateScalars
from megamix.model.decoder import Decoder
from megamix.model.family import family_of
from megamix.model.ops import Ops

Tensors = dict[str, Tensor]
MicroBatches = Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Step:
    """Mean loss and gradient of a global batch, and how large its micro-batches' were."""

    losses: list[float]  # of each micro-batch
    grads: Tensors  # FP64, of the mean loss: no scale
    magnitudes: dict[str, float]  # of each parameter: the largest sum over the micro-batches, over their number


class ExactOps(Ops):
    """FP64 stays FP64: elsewhere rotary positions are turned in FP32."""

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Reference:
    """One rank. `device`: where the layout computes, so that rounding is the same kind of rounding."""

    def __init__(self, config: Config, device: torch.device):
        plain = config.model.model_copy(update={"compile": False})
        torch.manual_seed(config.training.seed)
        family = family_of(plain)
        self._native = family(plain).to(device)
        self.initial = {name: param.detach().clone() for name, param in self._native.named_parameters()}
        self._exact = family(plain, ExactOps(wide=False)).to(device).double()

    def exact_step(self, weights: Mapping[str, Tensor], batches: MicroBatches) -> Step:
        """Take the step with these weights in FP64."""

        def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(self._exact(tokens).flatten(0, -2), targets.flatten())

        wide = {name: weight.double() for name, weight in weights.items()}
        return self._step(self._exact, loss_of, wide, batches, 1.0)

    def native_step(self, weights: Mapping[str, Tensor], batches: MicroBatches, loss_scale: float) -> Step:
        """Take the step with these weights, which have the layout's dtype, as any rank computes it."""
        return self._step(self._native, self._native, weights, batches, loss_scale)

    def _step(
        self, model: Decoder, loss_of: Callable[[Tensor, Tensor], Tensor], weights: Mapping[str, Tensor],
        batches: MicroBatches, scale: float,
    ) -> Step:  # fmt: skip
        params = dict(model.named_parameters())
        for name, param in params.items():
            param.data = weights[name].to(param.device)
        losses = []
        grads = {name: torch.zeros(param.shape, dtype=torch.float64) for name, param in params.items()}
        magnitudes = {name: torch.zeros(param.shape, dtype=torch.float64) for name, param in params.items()}
        for tokens, targets in batches:
            device = next(iter(params.values())).device
            loss = loss_of(tokens.to(device), targets.to(device))
            losses.append(loss.item())
            for name, grad in zip(params, torch.autograd.grad(loss * scale, [*params.values()]), strict=True):
                share = grad.to("cpu", torch.float64) / (scale * len(batches))
                grads[name] += share
                magnitudes[name] += share.abs()
        largest = {name: float(total.max()) for name, total in magnitudes.items()}
        return Step(losses, grads, largest)


def exact_update(
    optimizer: Optimizer, name: str, grad: Tensor, before: Mapping[str, Tensor], lr: float, update: int
) -> Tensors:
    """Return master and states after the optimizer's equation in FP64, by name as `before` has them.

    Shapes: grad FP64 and each of `before` like the parameter.
    """
    group = optimizer.group_of(name, tuple(grad.shape))
    coefficients = optimizer.coefficients(torch.tensor(float(update), dtype=torch.float64))
    at = UpdateScalars(torch.tensor(lr * group.lr_factor, dtype=torch.float64), group.weight_decay, coefficients)
    states = {state: tensor.double() for state, tensor in before.items()}
    new_master, new_states = optimizer.equation(grad, states.pop(MASTER), states, at)
    return {MASTER: new_master, **new_states}
