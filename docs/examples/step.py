"""Take mixed-precision steps on two ranks in plain torch: what megamix computes, one phase after the other.

torchrun --nproc-per-node 2 docs/examples/step.py

Parameters, activations and gradients are FP16. The FP32 masters of the weights, and AdamW's two states of each, are
sharded: each rank owns a part of one flat buffer, and updates that part alone. The phases of a step are functions, in
the step's order: forward, scale_loss, backward, reduce_scatter, agree, update, all_gather, update_loss_scale.

In shapes dp_size is the number of ranks, numel the length of the flat buffer with its padding, shard_numel is
numel / dp_size, and () a scalar. A scaled number still has the loss scale in it.

A test trains megamix's engine beside this file, without a compiler: all numbers are equal, bit for bit.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

STEPS = 22  # 20 updates and 2 overflows
VOCAB_SIZE, HIDDEN_SIZE, BATCH_SIZE = 50, 40, 128
LR = 2.0**-7  # a number that FP32 has, as megamix rounds it to FP32
BETAS, EPS, WEIGHT_DECAY = (0.9, 0.95), 1e-8, 0.1
CLIP_GRAD = 0.5  # largest norm of the averaged gradient
INIT_SCALE = 2.0**19  # a bit too large for the second step
GROWTH_FACTOR, BACKOFF_FACTOR, GROWTH_INTERVAL = 2.0, 0.5, 8  # powers of two, which round nothing
ROW = 64  # elements; each parameter and each shard starts at a multiple


class Net(nn.Module):
    """Guesses the next token from the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, HIDDEN_SIZE)
        self.hidden = nn.Linear(HIDDEN_SIZE, 2 * HIDDEN_SIZE, bias=False)
        self.head = nn.Linear(2 * HIDDEN_SIZE, VOCAB_SIZE, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(F.gelu(self.hidden(self.embedding(tokens))))


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return tokens and the tokens that follow them, INT64 (BATCH_SIZE,) each: other ones for each step and rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(VOCAB_SIZE, (BATCH_SIZE,), generator=generator)
    return tokens, (3 * tokens + 1) % VOCAB_SIZE


@dataclass
class TrainState:
    """Holds all that a rank remembers from one step to the next. The scalars are equal on all ranks."""

    model: nn.Module
    half_params: Tensor  # FP16 (numel,): casts of all masters, equal on all ranks; the Parameters are views into it
    half_grads: Tensor  # FP16 (numel,): gradients of this rank's batch, scaled; each Parameter's .grad is a view
    master: Tensor  # FP32 (shard_numel,): this rank's part of the weights
    exp_avg: Tensor  # FP32 (shard_numel,): running mean of the gradient
    exp_avg_sq: Tensor  # FP32 (shard_numel,): running mean of its square
    applied_updates: Tensor  # INT64 (): a step that overflowed does not count
    loss_scale: Tensor  # FP32 (): for the next step
    clean_steps: Tensor  # INT64 (): steps without overflow since the scale last changed


class StepResult(NamedTuple):
    """Holds a step's numbers, which are equal on all ranks."""

    loss: Tensor  # FP64 (): mean over the ranks, without the loss scale
    grad_norm: Tensor  # FP64 (): of the averaged, unscaled gradient, before clipping
    max_abs: Tensor  # FP64 (): largest magnitude of the summed, scaled gradient; FP16 ends at 65,504
    found_inf: Tensor  # bool (): True: nothing was changed but the loss scale
    loss_scale: Tensor  # FP32 (): the scale of this step's backward


def shard(model: nn.Module) -> TrainState:
    """Move an FP32 model, equal on all ranks, into flat FP16 buffers; keep this rank's part of its weights as masters.

    The last parameter comes first, as in backward: a larger model is cut into buckets, and the first one is summed
    while backward goes on. Padding has no gradient, so it stays zero.
    """
    params = [*model.parameters()][::-1]
    padded = [F.pad(param.detach().flatten(), (0, -param.numel() % ROW)) for param in params]
    full = torch.cat(padded)
    full = F.pad(full, (0, -full.numel() % (ROW * dist.get_world_size())))
    half_params = full.half()
    half_grads = torch.zeros_like(half_params)
    start = 0
    for param, values in zip(params, padded, strict=True):
        place = slice(start, start + param.numel())
        param.data = half_params[place].view(param.shape)
        param.grad = half_grads[place].view(param.shape)
        start += values.numel()
    master = parts_of(full)[dist.get_rank()].clone()
    states = torch.zeros_like(master), torch.zeros_like(master)
    zero = torch.zeros((), dtype=torch.int64)
    return TrainState(model, half_params, half_grads, master, *states, zero, torch.tensor(INIT_SCALE), zero.clone())


def parts_of(flat: Tensor) -> list[Tensor]:
    """Return the ranks' parts of a flat buffer, as views. Shapes: (numel,) -> dp_size times (shard_numel,)."""
    return [*flat.chunk(dist.get_world_size())]


def divisor(loss_scale: Tensor) -> Tensor:
    """Return what a sum of scaled gradients is divided by for their mean, unscaled. Shapes: FP32 () -> FP64 ()."""
    return loss_scale.double() * dist.get_world_size()


def forward(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of this rank's batch. Shapes: INT64 (BATCH_SIZE,) each -> FP32 ()."""
    logits = model(tokens)  # FP16 (BATCH_SIZE, VOCAB_SIZE)
    return F.cross_entropy(logits.float(), targets)  # a softmax in FP16 would lose the small probabilities


def scale_loss(loss: Tensor, loss_scale: Tensor) -> Tensor:
    """Return the loss that backward starts from. Shapes: FP32 () each -> FP32 ().

    FP16's smallest number is 2**-24, and many gradients are smaller. By the chain rule a factor of the loss is a factor
    of each gradient, so the scale lifts all of them together.
    """
    return loss * loss_scale


def backward(scaled_loss: Tensor, half_grads: Tensor) -> None:
    """Fill `half_grads` with d(scaled_loss) / d(half_params). Shapes: FP32 () -> FP16 (numel,)."""
    half_grads.zero_()  # backward adds, also over the micro-batches of a step if there were several
    scaled_loss.backward()


def reduce_scatter(half_grads: Tensor) -> Tensor:
    """Return this rank's part of the sum over the ranks, scaled. Shapes: FP16 (numel,) -> FP16 (shard_numel,)."""
    grad_shard = torch.empty_like(parts_of(half_grads)[0])
    # A sum, no mean: to divide small halves would make them zeros, so `update` divides, in FP32.
    dist.reduce_scatter(grad_shard, parts_of(half_grads))
    return grad_shard


def agree(grad_shard: Tensor, loss: Tensor, loss_scale: Tensor) -> StepResult:
    """Gather three numbers of each rank, so that all ranks know alike whether the step overflowed, and the norm.

    This comes after the reduction, because two finite halves can add up to inf. Only that element's owner sees it, and
    must not be the only one to skip its update.
    Shapes: grad_shard FP16 (shard_numel,), loss FP32 (), loss_scale FP32 ().
    """
    # FP32 within a row, which squares of halves cannot overflow, and FP64 over rows: the norm, and so the clipping,
    # does not depend on where the shards are cut.
    rows = grad_shard.float().view(-1, ROW)
    own = torch.stack([rows.square().sum(1).double().sum(), rows.abs().amax().double(), loss.detach().double()])
    by_rank = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(by_rank, own)
    sums_of_squares, max_abs, losses = torch.stack(by_rank).unbind(1)  # FP64 (dp_size,) each
    sum_of_squares = sums_of_squares.sum()
    return StepResult(
        loss=losses.mean(),
        grad_norm=sum_of_squares.sqrt() / divisor(loss_scale),
        max_abs=max_abs.amax(),
        found_inf=~torch.isfinite(sum_of_squares),  # one inf or NaN makes the sum inf or NaN
        loss_scale=loss_scale.clone(),
    )


def update(state: TrainState, grad_shard: Tensor, result: StepResult) -> None:
    """Update this rank's masters and states, all FP32, unless found_inf. Shapes: grad_shard FP16 (shard_numel,).

    Unscaling, averaging and clipping are one multiplication in FP32; in FP16 small gradients would vanish again. It
    divides by the scale that this step's backward used.
    """
    clip = (CLIP_GRAD / (result.grad_norm + 1e-6)).clamp(max=1.0)
    grad = grad_shard.float() * (clip / divisor(result.loss_scale)).float()
    number = state.applied_updates + 1
    held = (state.master, state.exp_avg, state.exp_avg_sq)
    for old, new in zip(held, adamw(grad, *held, number), strict=True):
        # Chosen, not multiplied by 0: 0 * inf is NaN, which would stay in the states for ever.
        old.copy_(torch.where(result.found_inf, old, new))
    state.applied_updates.copy_(torch.where(result.found_inf, state.applied_updates, number))


def adamw(grad: Tensor, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, number: Tensor) -> tuple[Tensor, ...]:
    """Return master, exp_avg and exp_avg_sq after update `number` of Adam with decoupled weight decay.

    Shapes: FP32 (shard_numel,) each, number INT64 (), 1 for the first. The operations, and their order, are those of
    torch's fused AdamW.
    """
    # The means begin at 0, and gradients have the weight 1 - beta**number in them (FP64, rounded once). A skipped step
    # brought no gradient, so it does not count.
    bias_correction1, bias_correction2 = (1 - beta ** number.double() for beta in BETAS)
    exp_avg = torch.lerp(exp_avg, grad, 1 - BETAS[0])
    exp_avg_sq = (exp_avg_sq * BETAS[1]).addcmul(grad, grad, value=1 - BETAS[1])
    # By way of FP64: of FP32, torch.sqrt on a CPU may return the second nearest number.
    denom = exp_avg_sq.double().sqrt().float() / bias_correction2.sqrt() + EPS
    master = master * (1 - LR * WEIGHT_DECAY) - LR / bias_correction1 * exp_avg / denom
    return master, exp_avg, exp_avg_sq


def all_gather(half_params: Tensor, master: Tensor) -> None:
    """Cast this rank's masters, and fill `half_params` with all ranks' casts: 2 bytes a weight travel, not 4.

    Shapes: half_params FP16 (numel,), master FP32 (shard_numel,).
    """
    dist.all_gather(parts_of(half_params), master.half())


def update_loss_scale(state: TrainState, found_inf: Tensor) -> None:
    """Lower the scale at an overflow, raise it after GROWTH_INTERVAL clean steps: gradients change during a training.

    This comes last: until here the step needs the scale that its backward used. Shapes: found_inf bool ().
    """
    clean_steps = torch.where(found_inf, 0, state.clean_steps + 1)
    grows = clean_steps == GROWTH_INTERVAL
    factor = torch.where(found_inf, BACKOFF_FACTOR, torch.where(grows, GROWTH_FACTOR, 1.0))
    state.loss_scale.mul_(factor)
    state.clean_steps.copy_(torch.where(grows, 0, clean_steps))


def train_step(state: TrainState, tokens: Tensor, targets: Tensor) -> StepResult:
    """Take one step, phase by phase. Shapes: tokens and targets INT64 (BATCH_SIZE,), of this rank."""
    loss = forward(state.model, tokens, targets)
    scaled_loss = scale_loss(loss, state.loss_scale)
    backward(scaled_loss, state.half_grads)
    grad_shard = reduce_scatter(state.half_grads)
    result = agree(grad_shard, loss, state.loss_scale)
    update(state, grad_shard, result)
    all_gather(state.half_params, state.master)
    update_loss_scale(state, result.found_inf)
    return result


def main() -> None:
    """Train, and let the first rank print a line for each step."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    state = shard(Net())
    for step in range(STEPS):
        result = train_step(state, *batch(step, dist.get_rank()))
        if dist.get_rank() == 0:
            numbers = f"loss {result.loss:.3f}  grad norm {result.grad_norm:.3f}  largest {result.max_abs:7.1f}"
            overflow = "  overflow, nothing changed" if result.found_inf else ""
            print(f"step {step:2}  {numbers}  loss scale 2^{result.loss_scale.log2():.0f}{overflow}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
