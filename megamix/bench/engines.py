"""The sides of a comparison behind one small interface: ours, and forward and backward alone (others: peers.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megamix.config import ModelConfig
from megamix.mixed_precision.engine import ShardedEngine
from megamix.mixed_precision.loss_scale import DynamicLossScale
from megamix.mixed_precision.optimizers import AdamW
from megamix.mixed_precision.settings import Precision, ReduceDtype, Sharding
from megamix.model.ops import Ops
from megamix.model.transformer import Transformer
from megamix.train.precision_report import gather_precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What every side trains, and by which rules."""

    model: ModelConfig
    micro_batch_size: int = 4  # sequences on each rank
    micro_batches: int = 1  # of a step; more than one where a pipeline cuts its batch
    shared: bool = False  # the ranks divide the model and take part in the same sequences
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1  # of parameters with two dims; norms have none
    clip_grad: float = 1.0
    compile_update: bool = True  # ours; no side compiles its model


class Engine(Protocol):
    """One side on one rank."""

    def forward_backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """All micro-batches of a step; their loss, FP32 (), or 0 where another rank knows it.

        Shapes: INT64 (micro_batches * micro_batch_size, seq_len).
        """

    def optimize(self) -> None:
        """All that follows backward: what is left of the reduction, clipping, the update, sending weights out."""

    def finish(self) -> None:
        """Wait for what a step has left under way."""

    def details_ms(self) -> dict[str, float]:
        """Parts of the time since the last call, by name, where the side can tell them apart."""


def make_model(work: Work, *, wide: bool = True) -> Transformer:
    """The same weights on every side and rank."""
    torch.manual_seed(1234)
    return Transformer(work.model, Ops(wide=wide))


def make_engine(work: Work, model: Transformer, precision: Precision, sharding: Sharding) -> ShardedEngine:
    """By the rules of `work`, with a running clock. Every rank must call it."""
    engine = ShardedEngine(
        model,
        AdamW(lr=work.lr, betas=work.betas, eps=work.eps, weight_decay=work.weight_decay),
        precision,
        sharding,
        clip_grad=work.clip_grad,
        grad_accum_steps=work.micro_batches,
        compile_update=work.compile_update,
    )
    engine.clock.enabled = True
    return engine


class Ours:
    """megamix. `wide`: half products computed in FP32 on a CPU without FP16 units. `reduce_dtype` "fp32": with FP32
    gradients.
    """

    def __init__(
        self, work: Work, dtype: torch.dtype = torch.bfloat16, *,
        wide: bool = True, overlap: bool = True, reduce_dtype: ReduceDtype | None = None,
    ):  # fmt: skip
        model = make_model(work, wide=wide)
        reduced = torch.float32 if reduce_dtype == "fp32" else None
        # 2**16 holds for these steps: the search for the largest scale, from 2**24 down, would be timed otherwise.
        loss_scale = DynamicLossScale(init_scale=2.0**16) if dtype == torch.float16 else None
        precision = Precision(dtype, reduced, loss_scale, reduce_dtype)
        self.engine = make_engine(work, model, precision, Sharding(units=[*model.blocks], overlap=overlap))

    def forward_backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.engine(tokens, targets)
        self.engine.backward(loss)
        return loss.detach()

    def optimize(self) -> None:
        self.engine.step()

    def finish(self) -> None:
        self.engine.param_gather.wait_all()

    def details_ms(self) -> dict[str, float]:
        return {name: 1e3 * seconds for name, seconds in self.engine.clock.read().items()}


class Examined(Ours):
    """megamix with every step examined, and what it says gathered as a run does for its log."""

    def forward_backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.engine.examine_next_step()
        return super().forward_backward(tokens, targets)

    def optimize(self) -> None:
        result = self.engine.step()
        assert result.examination is not None
        gather_precision(self.engine, result.examination, result.by_piece, float(result.loss_scale))


class ForwardBackward:
    """Our half model with its gradients dropped: no optimizer and no other rank. The ceiling of ours."""

    def __init__(self, work: Work, dtype: torch.dtype = torch.bfloat16):
        self.model = make_model(work).to(dtype)

    def forward_backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.model(tokens, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self.model.zero_grad(set_to_none=True)
        return loss.detach()

    def optimize(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def details_ms(self) -> dict[str, float]:
        return {}
