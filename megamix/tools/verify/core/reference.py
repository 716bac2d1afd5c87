"""The same step on one rank: no buckets, no shards, no collectives, FP64 throughout.

It is taken once more in the training's own precision, by the plain model alone, to know how far rounding takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from megamix.base.added_loss import added_losses_times
from megamix.config import Config
from megamix.data.loader import IGNORE, Batch
from megamix.model.family import family_of
from megamix.model.fp8 import use_fp8
from megamix.model.ops import Ops
from megamix.tools.verify.core.choices import Choices, WatchedRouter, watched_routers
from megamix.tools.verify.core.verdict import UNIT, Tensors

LossOf = Callable[[nn.Module, Any], Tensor]  # returns the mean loss of a micro-batch
Work = Sequence[tuple[Any, float]]  # micro-batches, each with the weight of its mean in the loss
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Step:
    """Loss and gradient of a global batch, and the size of its micro-batches' gradients."""

    loss: float
    losses: list[float]  # loss of each micro-batch
    grads: Tensors  # FP64, gradients of the loss without a scale
    magnitudes: Tensors  # FP64, of each element of a gradient: the sum of its magnitudes over the micro-batches
    rankings: list[Tensors]  # FP64 scores of experts in each micro-batch, by router


@dataclass(frozen=True, slots=True)
class Reference:
    """One rank. Both models are on the device of the training, so that rounding is of the same kind.

    `routers`: those of each model. `choices`: those of the ranks, by the id of a micro-batch's tokens.
    """

    native: nn.Module
    exact: nn.Module  # FP64
    native_loss: LossOf
    exact_loss: LossOf
    routers: Mapping[nn.Module, Mapping[str, WatchedRouter]] = field(default_factory=dict)
    choices: Mapping[int, Choices] = field(default_factory=dict)

    @classmethod
    def of_config(cls, config: Config, device: torch.device) -> Self:
        """Return the reference of a job's model, with its initial weights."""
        plain = config.model.model_copy(update={"compile": False})
        torch.manual_seed(config.training.seed)
        family = family_of(plain)
        native, exact = family(plain).to(device), family(plain, Ops(wide=False)).to(device).double()
        if config.precision.fp8 is not None:
            use_fp8(native, config.precision.fp8)

        def exact_loss(model: nn.Module, batch: Batch) -> Tensor:
            logits = model(batch.tokens, positions=batch.positions).flatten(0, -2)
            logits = logits if logits.dtype == torch.float64 else logits.float()
            targets = batch.targets.flatten()
            total = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
            if z_loss := getattr(plain, "z_loss", 0.0):
                total = total + z_loss * logits.logsumexp(-1)[targets != IGNORE].square().sum()
            loss: Tensor = total / targets.numel()
            return loss

        routers: dict[nn.Module, dict[str, WatchedRouter]] = {one: watched_routers(one) for one in (native, exact)}
        return cls(native, exact, lambda model, batch: model(*batch.inputs), exact_loss, routers)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of a micro-batch by one of the models, whose routers choose what the ranks chose."""
        device = next(model.parameters()).device
        for name, router in self.routers.get(model, {}).items():
            chosen = self.choices.get(id(batch.tokens), {}).get(name)
            router.told = None if chosen is None else chosen.to(device)
        loss_of = self.exact_loss if model is self.exact else self.native_loss
        return loss_of(model, moved(batch, device))

    def put(self, model: nn.Module, weights: Tensors) -> None:
        """Set every parameter of one of the models, and the buffers that are given.

        The native one's parameters all take the coarsest of their dtypes, which has the largest rounding: with mixed
        dtypes wrappers cast at their borders, which the plain model cannot do.
        """
        params = dict(model.named_parameters())
        coarsest = max((weights[name].dtype for name in params), key=UNIT.__getitem__)
        for name, param in params.items():
            param.data = weights[name].to(param.device, torch.float64 if model is self.exact else coarsest)
        for name, buffer in model.named_buffers():
            if name in weights:
                buffer.copy_(weights[name])

    def step(self, model: nn.Module, weights: Tensors, work: Work, scale: float = 1.0) -> Step:
        """Take the step with these weights by one of the models."""
        self.put(model, weights)
        params = {name: param for name, param in model.named_parameters() if param.requires_grad}
        losses, rankings = list[float](), list[Tensors]()
        grads = {name: torch.zeros(param.shape, dtype=torch.float64) for name, param in params.items()}
        magnitudes = dict(grads)
        largest = max((share for _, share in work), default=1.0)
        for batch, share in work:
            loss = self.loss(model, batch)
            losses.append(loss.item())
            routers = self.routers.get(model, {}).items()
            rankings.append({name: router.take()[-1].ranking.double() for name, router in routers})
            own = scale * (share / largest) or scale  # a micro-batch with fewer targets is multiplied by less
            with added_losses_times(own):
                found = torch.autograd.grad(loss * own, [*params.values()], allow_unused=True)
            for name, grad in zip(params, found, strict=True):
                if grad is not None:
                    part = grad.to("cpu", torch.float64) * (share / own)
                    grads[name] = grads[name] + part
                    magnitudes[name] = magnitudes[name] + part.abs()
        mean = sum(loss * share for loss, (_, share) in zip(losses, work, strict=True))
        return Step(mean, losses, grads, magnitudes, rankings)


def finite(grads: Tensors) -> bool:
    return all(bool(grad.isfinite().all()) for grad in grads.values())


def moved(batch: Any, to: torch.device | torch.dtype = CPU) -> Any:
    """Return a micro-batch of tensors in tuples, lists and mappings on a device, or its floating tensors in a dtype."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Mapping):  # of a class that tree_map does not know
            return moved(dict(leaf), to)
        if isinstance(leaf, tuple | list):
            return moved([*leaf], to)
        moves = isinstance(leaf, Tensor) and (isinstance(to, torch.device) or leaf.is_floating_point())
        return leaf.to(to) if moves else leaf

    return tree_map(move, batch)
