"""torch's own ways to train data-parallel in mixed precision, each as its documentation has it, on the same model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megamix.bench.engines import Work, make_model


def param_groups(model: nn.Module, work: Work) -> list[dict[str, Any]]:
    """No weight decay on norms, as on our side."""
    params = [*model.parameters()]
    return [
        {"params": [param for param in params if param.dim() > 1], "weight_decay": work.weight_decay},
        {"params": [param for param in params if param.dim() <= 1], "weight_decay": 0.0},
    ]


class Ddp:
    """DistributedDataParallel, autocast and AdamW(fused=True): weights, gradients and states FP32 on every rank."""

    def __init__(self, work: Work, dtype: torch.dtype = torch.bfloat16):
        self._clip_grad, self._dtype = work.clip_grad, dtype
        # Gradients that are views of the reducer's buckets save a copy in time and one in memory.
        self.model: nn.Module = DistributedDataParallel(make_model(work), gradient_as_bucket_view=True)
        self.optimizer = self._make_optimizer(param_groups(self.model, work), work)

    def _make_optimizer(self, groups: list[dict[str, Any]], work: Work) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=work.lr, betas=work.betas, eps=work.eps, fused=True)

    def forward_backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", self._dtype, enabled=self._dtype != torch.float32):
            loss: Tensor = self.model(tokens, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def optimize(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_grad)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def finish(self) -> None:
        pass

    def details_ms(self) -> dict[str, float]:
        return {}


class Zero(Ddp):
    """The same with ZeroRedundancyOptimizer: each rank holds the states of its share of the parameters."""

    def _make_optimizer(self, groups: list[dict[str, Any]], work: Work) -> torch.optim.Optimizer:
        # Imported here, as FSDP below: a rank of another side would pay for it in its start-up time.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(
            groups, torch.optim.AdamW, lr=work.lr, betas=work.betas, eps=work.eps, fused=True
        )
        return optimizer


class Fsdp(Ddp):
    """FSDP2: fully_shard on each block and on the root; weights, gradients and states FP32, sharded."""

    def __init__(self, work: Work, dtype: torch.dtype = torch.bfloat16, reduce_dtype: torch.dtype = torch.bfloat16):
        from torch.distributed.device_mesh import init_device_mesh

        self._clip_grad = work.clip_grad
        model = self.model = make_model(work)
        shard_fully(model, model.blocks, init_device_mesh("cpu", (dist.get_world_size(),)), dtype, reduce_dtype)
        self.optimizer = self._make_optimizer(param_groups(model, work), work)

    def forward_backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.model(tokens, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


def shard_fully(
    root: nn.Module, blocks: Iterable[nn.Module], mesh: Any, dtype: torch.dtype, reduce_dtype: torch.dtype,
    **settings: Any,
) -> None:  # fmt: skip
    """`fully_shard` on each block and on the root, in mixed precision."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype)
    for module in (*blocks, root):
        fully_shard(module, mesh=mesh, mp_policy=policy, **settings)
