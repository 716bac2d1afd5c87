"""Sides of a comparison behind one small interface: ours, forward and backward alone, and torch's own ways.

torch's train data-parallel in mixed precision, each as its documentation has it, on the same model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from megamix.base.machine import native_halves
from megamix.config import FP8Config, ModelConfig
from megamix.mixed_precision.engine import ShardedEngine
from megamix.mixed_precision.loss_scale import DynamicLossScale
from megamix.mixed_precision.optim.adamw import AdamW
from megamix.mixed_precision.optim.muon import Muon
from megamix.mixed_precision.settings import Precision, Shard, Sharding
from megamix.mixed_precision.weights import Fill
from megamix.model.family import parameter_count
from megamix.model.fp8 import use_fp8
from megamix.model.language_model import LanguageModel
from megamix.model.ops import Ops
from megamix.model.transformer import Transformer

GPT_3M = ModelConfig(vocab_size=1024, seq_len=128, hidden_size=256, num_layers=4, num_heads=4)
GPT_12M = ModelConfig(vocab_size=4096, seq_len=256, hidden_size=384, num_layers=6, num_heads=6)
GPT_124M = ModelConfig(
    vocab_size=50304, seq_len=1024, hidden_size=768, num_layers=12, num_heads=12, activation="gelu", compile=True
)
GPT_1300M = GPT_124M.model_copy(update={"seq_len": 2048, "hidden_size": 2048, "num_layers": 24, "num_heads": 16})

STATE_BYTES = 18  # of a parameter: weight, gradient and moments in FP32, and a half copy by autocast; ours has 16
_USABLE = 0.85  # share of a card's memory; the rest is for contexts, workspaces and fragments


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work that every side does, and its rules."""

    model: ModelConfig = GPT_12M
    micro_batch_size: int = 4  # sequences on each rank
    micro_batches: int = 1  # micro-batches of a step
    blocks_a_unit: int = 1  # blocks that are called, gathered and freed as one
    shared: bool = False  # True: the ranks divide the model and take part in the same sequences
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1  # decay of parameters with two dims; norms have none
    clip_grad: float = 1.0
    compile_update: bool = True  # ours; a side compiles its model if `model` says so
    device: str = "cpu"  # device of every rank; "cuda" is the GPU that the pool gave the rank
    dtype: torch.dtype | None = None  # of every product; None: the half dtype of the device

    @property
    def half(self) -> torch.dtype:
        """Return the dtype to train in."""
        return self.dtype or half_of(self.device)


SIZES = {
    "3M": Work(model=GPT_3M, compile_update=False),  # compiling takes each rank some seconds
    "12M": Work(),
    "124M": Work(model=GPT_124M, micro_batch_size=32),
    "1.3B": Work(model=GPT_1300M, micro_batch_size=8),
}


def sides_at_once(work: Work, memory: float) -> int:
    """Return of how many sides a GPU of `memory` bytes holds the states, while one of them takes steps.

    A step keeps 34 bytes a token, layer and element of the hidden size (Korthikanti et al. 2022, Reducing Activation
    Recomputation in Large Transformer Models, section 4.1, without scores), 10 more under autocast, where the residual
    stream is FP32, and its logits with their gradient.
    """
    model = work.model
    a_token = 44 * model.hidden_size * model.num_layers + 4 * model.vocab_size
    left = _USABLE * memory - work.micro_batch_size * model.seq_len * a_token
    return int(left // (STATE_BYTES * parameter_count(model)))


def fitted(work: Work, memory: float) -> Work:
    """Return the work with half the sequences, then with half the layers, until a GPU of `memory` bytes holds it."""
    size, model = work.micro_batch_size, work.model
    while sides_at_once(work, memory) < 1 and model.num_layers > 1:
        if size > 1:
            size //= 2
        else:
            model = model.model_copy(update={"num_layers": model.num_layers // 2})
        work = replace(work, micro_batch_size=size, model=model)
    return work


class Engine(ABC):
    """One side on one rank."""

    micro_batches = 1  # number of parts into which a step's batch is cut

    def forward_backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Run all micro-batches of a step. Return their loss, FP32 (), or 0 if another rank knows it.

        Shapes: INT64 (micro_batches * micro_batch_size, seq_len).
        """
        parts = zip(tokens.chunk(self.micro_batches), targets.chunk(self.micro_batches), strict=True)
        losses = [self._pass(*part, last=number == self.micro_batches) for number, part in enumerate(parts, start=1)]
        return torch.stack(losses).mean()

    def _pass(self, tokens: Tensor, targets: Tensor, *, last: bool) -> Tensor:
        """Run one micro-batch and return its loss. `last`: whether it is the step's last one."""
        raise NotImplementedError

    @abstractmethod
    def optimize(self) -> None:
        """Do all work after backward: the rest of the reduction, clipping, the update, sending weights out."""

    def finish(self) -> None:  # noqa: B027  # most sides leave nothing
        """Wait for the work that a step has left under way."""

    def details_ms(self) -> dict[str, float]:
        """Return parts of the time since the last call, by name, if the side can tell them apart."""
        return {}


SEED = 1234  # seed of the initial weights


class _DrawnThere(Transformer):
    """Transformer that draws its weights on its GPU, not alike on all machines, in no time: a job's take a CPU a minute
    for 5e9.
    """

    def reset_parameters(self) -> None:
        self.tie()
        for name, param in self.named_parameters():
            param.data.normal_(self.rules[name].draw == "ones", self.rules[name].std)


def make_model(work: Work, *, wide: bool = True) -> Transformer:
    """Return a model with the same weights on every side and rank."""
    torch.manual_seed(SEED)
    with torch.device(work.device):
        model = (_DrawnThere if work.device == "cuda" else Transformer)(work.model, Ops(wide=wide))
    if work.blocks_a_unit > 1:
        blocks = range(0, len(model.blocks), work.blocks_a_unit)
        model.blocks = nn.ModuleList(_Blocks(*model.blocks[start : start + work.blocks_a_unit]) for start in blocks)
        model.config = model.config.model_copy(update={"num_layers": len(model.blocks)})
    return model


class _Blocks(nn.Sequential):
    """Several blocks that are called as one."""

    def forward(self, x: Tensor, *context: object) -> Tensor:
        for block in self:
            x = block(x, *context)
        return x

    @property
    def is_repeated(self) -> bool:
        """Return whether backward computes them again."""
        return bool(self[0].is_repeated)


def product_dtype(work: Work) -> torch.dtype:
    """Return the dtype in which autocast and torch's own operations multiply.

    It is `work.half`, or FP32 on a CPU without arithmetic in it, where products would take up to 100 times as long.
    """
    return torch.float32 if work.device == "cpu" and work.half not in native_halves() else work.half


def half_of(device: str) -> torch.dtype:
    """Return the half dtype to train in: BF16, or FP16 on a GPU without arithmetic in BF16."""
    lacks = device == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.float16 if lacks else torch.bfloat16


def how_multiplied(device: str) -> list[str]:
    """Return a note if products of BF16 are not computed in BF16."""
    if device == "cuda" or torch.bfloat16 in native_halves():
        return []
    return ["this CPU has no arithmetic in BF16: every side computes wide, in FP32 on halves; torch's layouts in FP32"]


def make_engine(
    work: Work,
    model: LanguageModel,
    sharding: Sharding,
    fill: Fill | None = None,
    optimizer: Callable[..., AdamW] = AdamW,
) -> ShardedEngine:
    """Return an engine by the rules of `work`, with a running clock. Every rank must call it."""
    # 2**16 holds for these steps. Without it the search for the largest scale, from 2**24 down, would be timed.
    loss_scale = DynamicLossScale(init_scale=2.0**16) if work.half == torch.float16 else None
    engine = ShardedEngine(
        model,
        optimizer(lr=work.lr, betas=work.betas, eps=work.eps, weight_decay=work.weight_decay),
        Precision(work.half, loss_scale=loss_scale),
        sharding,
        clip_grad=work.clip_grad,
        grad_accum_steps=work.micro_batches,
        compile_update=work.compile_update,
        fill=fill,
    )
    engine.clock.enabled = True
    return engine


class Ours(Engine):
    """megamix. `fp8`: recipe of products in FP8."""

    def __init__(
        self, work: Work, *,
        shard: Shard = "states", optimizer: Callable[..., AdamW] = AdamW, fp8: str = "none",
    ):  # fmt: skip
        self.micro_batches = work.micro_batches
        model = make_model(work)
        if fp8 != "none":
            use_fp8(model, FP8Config.model_validate({"recipe": fp8}))
        self.engine = make_engine(work, model, Sharding(model.units, shard=shard), optimizer=optimizer)

    def _pass(self, tokens: Tensor, targets: Tensor, *, last: bool) -> Tensor:
        loss: Tensor = self.engine(tokens, targets)
        self.engine.backward(loss)
        return loss.detach()

    def optimize(self) -> None:
        self.engine.step()

    def finish(self) -> None:
        self.engine.wait()

    def details_ms(self) -> dict[str, float]:
        return {name: 1e3 * seconds for name, seconds in self.engine.clock.read().items()}


class ForwardBackward(Engine):
    """Our half model with its gradients dropped: no optimizer and no other rank. Its speed is the ceiling of ours."""

    def __init__(self, work: Work):
        self.micro_batches = work.micro_batches
        self.model = make_model(work).to(work.half)

    def _pass(self, tokens: Tensor, targets: Tensor, *, last: bool) -> Tensor:
        loss: Tensor = self.model(tokens, targets)
        (loss / self.micro_batches).backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        return loss.detach()

    def optimize(self) -> None:
        self.model.zero_grad(set_to_none=True)


class ByHand(ForwardBackward):
    """Training on one rank as a careful user would write it by hand.

    Half parameters; FP32 masters, copied to and fro by torch's _foreach calls; AdamW(fused=True) on the masters.
    """

    def __init__(self, work: Work):
        super().__init__(work)
        self._clip_grad = work.clip_grad
        self._params: list[Tensor] = [*self.model.parameters()]
        self._masters = [param.detach().float() for param in self._params]
        self._grads = [torch.empty_like(master) for master in self._masters]
        for master, grad in zip(self._masters, self._grads, strict=True):
            master.grad = grad
        self.optimizer = fused_adamw(self._masters, work)

    @torch.no_grad()
    def optimize(self) -> None:
        halves: list[Any] = [param.grad for param in self._params]
        torch._foreach_copy_(self._grads, halves)
        torch.nn.utils.clip_grad_norm_(self._masters, self._clip_grad)
        self.optimizer.step()
        torch._foreach_copy_(self._params, self._masters)
        super().optimize()


class _HalfForward(nn.Module):
    """Stand-in for autocast on a CPU without arithmetic in halves.

    Forward takes a half copy of the FP32 weights, and the model's own operations compute wide.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        super().__init__()
        self.model, self._dtype = model, dtype

    def forward(self, *args: Tensor) -> Tensor:
        halves = {name: param.to(self._dtype) for name, param in self.model.named_parameters()}
        loss: Tensor = torch.func.functional_call(self.model, halves, args)
        return loss


def fused_adamw(
    params: Iterable[Tensor], work: Work, make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
) -> torch.optim.Optimizer:
    """Return torch's optimizer by the rules of `work`. Norms and biases have no weight decay, as on our side."""
    params = [*params]
    matrices, others = ([param for param in params if (param.dim() > 1) is many] for many in (True, False))
    groups = [{"params": matrices, "weight_decay": work.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return make(groups, lr=work.lr, betas=work.betas, eps=work.eps, fused=True)


class Autocast(Engine):
    """Autocast and AdamW(fused=True) on one rank: weights, gradients and states FP32, and in FP16 a GradScaler."""

    def __init__(self, work: Work, **settings: Any):
        self._dtype = product_dtype(work)
        self.model = self._make_model(work, **settings)
        self._clip_grad, self.micro_batches = work.clip_grad, work.micro_batches
        # A user of torch compiles the loss, too. Our head's multiplies in place, which autocast leaves in FP32.
        self._compiled_loss = torch.compile(_cross_entropy, dynamic=False) if work.model.compile else None
        self._scaler = torch.amp.GradScaler(work.device, enabled=work.half == torch.float16)
        self.optimizer = self._make_optimizer(self.model, work)

    def _make_model(self, work: Work, **settings: Any) -> nn.Module:
        """Return the model to train, wrapped or divided as torch has it. `settings`: the constructor's."""
        model = make_model(work)
        return model if self._dtype == work.half else _HalfForward(model, work.half)

    def _make_optimizer(self, model: nn.Module, work: Work) -> torch.optim.Optimizer:
        return fused_adamw(model.parameters(), work)

    def _pass(self, tokens: Tensor, targets: Tensor, *, last: bool) -> Tensor:
        with torch.autocast(tokens.device.type, self._dtype, enabled=self._dtype != torch.float32):
            if self._compiled_loss is None:
                loss: Tensor = self.model(tokens, targets)
            else:
                loss = self._compiled_loss(self.model(tokens), targets)
        self._scaler.scale(loss / self.micro_batches).backward()  # type: ignore[no-untyped-call]  # untyped in torch
        return loss.detach()

    def optimize(self) -> None:
        self._scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_grad)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.optimizer.zero_grad(set_to_none=True)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def join_a_group(device: str) -> None:
    """Make a group of this rank alone if it has none: torch's ways need one."""
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device == "cuda" else "gloo", store=HashStore(), rank=0, world_size=1)


class Ddp(Autocast):
    """DistributedDataParallel, autocast and AdamW(fused=True): weights, gradients and states FP32 on every rank."""

    def _make_model(self, work: Work, **settings: Any) -> nn.Module:
        join_a_group(work.device)
        # Gradients that are views of the reducer's buckets save a copy in time and one in memory.
        return DistributedDataParallel(super()._make_model(work), gradient_as_bucket_view=True)

    def _pass(self, tokens: Tensor, targets: Tensor, *, last: bool) -> Tensor:
        assert isinstance(self.model, DistributedDataParallel)
        with nullcontext() if last else self.model.no_sync():
            return super()._pass(tokens, targets, last=last)


def plain(work: Work) -> Autocast:
    """Return training by torch's own means: DDP, or on one rank its model as it is."""
    several = dist.is_initialized() and dist.get_world_size() > 1
    return (Ddp if several else Autocast)(work)


class Zero(Ddp):
    """Ddp with ZeroRedundancyOptimizer: each rank holds the states of its share of the parameters."""

    def _make_optimizer(self, model: nn.Module, work: Work) -> torch.optim.Optimizer:
        # Imported here, as FSDP is below: a rank of another side would pay for it in its start-up time.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        sharded = partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW)
        return fused_adamw(model.parameters(), work, sharded)


class Fsdp(Autocast):
    """FSDP2: fully_shard on each block and on the root; weights, gradients and states FP32, sharded.

    `settings`: keywords of every fully_shard.
    """

    def _make_model(self, work: Work, **settings: Any) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh

        join_a_group(work.device)
        self._dtype = torch.float32  # nothing is left for autocast
        model = make_model(work)
        mesh = init_device_mesh(work.device, (dist.get_world_size(),))
        shard_fully(model, model.blocks, mesh, work.half, **settings)
        return model


def shard_fully(root: nn.Module, blocks: Iterable[nn.Module], mesh: Any, dtype: torch.dtype, **settings: Any) -> None:
    """Apply `fully_shard` to each block and to the root, in mixed precision."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    for module in (*blocks, root):
        fully_shard(module, mesh=mesh, mp_policy=policy, **settings)


# Sides of whole steps. "resharded" is FSDP2 that frees a part's weights between its forward and its backward.
SIDES: dict[str, Callable[[Work], Engine]] = {
    "ours": Ours,
    "gradients": partial(Ours, shard="gradients"),
    "parameters": partial(Ours, shard="parameters"),
    "muon": partial(Ours, optimizer=Muon),
    "fp8_rowwise": partial(Ours, fp8="rowwise"),
    "fp8_tensorwise": partial(Ours, fp8="tensorwise"),
    "plain": plain,
    "ddp": Ddp,
    "zero": Zero,
    "fsdp2": Fsdp,
    "resharded": partial(Fsdp, reshard_after_forward=True),
    "forward and backward": ForwardBackward,
}
