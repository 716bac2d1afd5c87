"""Measurements on every rank of a pool, or of the world that torchrun has started. Answers are plain numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megamix.comm.collectives import make_collectives, sum_in_rank_order
from megamix.comm.topology import Topology
from megamix.config import ModelConfig
from megamix.model.transformer import Transformer
from megamix.tools.bench.ranks import Side, TrainRank, seconds_of
from megamix.tools.bench.sides import SIDES, Engine, Ours, Work, fitted, half_of
from megamix.tools.doctor.cards import Card, probe_cards
from megamix.tools.verify.core.observed_step import rank_device
from megamix.tools.verify.core.verdict import NOISE, UNIT

_TINY = ModelConfig(vocab_size=256, seq_len=64, hidden_size=128, num_layers=2, num_heads=2)
COMPARED = ("ours", "fsdp2", "plain")  # of SIDES
_SEQ = 128  # positions of a compiled block
_SIZE = 0.005  # of a gradient, by chance; a rounding of each element is three times less
_BLOCKS: dict[str, dict[str, Any]] = {  # keys' biases have no gradient
    "SwiGLU": {"activation": "swiglu", "qk_norm": "head"},
    "GELU": {"activation": "gelu", "norm": "layernorm", "bias": True, "qkv_bias": False},
}


def sums_off(numel: int = 4096) -> dict[str, float]:
    """Return the largest error of each collective as a share of its bound: more than 1 is wrong.

    A share of a bitwise check is 0 or inf. `numel`: elements of a rank's part. The bound of a sum in the backend's own
    order is a rounding of each partial sum, n * u * sum of magnitudes.
    """
    device, world = rank_device(), Topology.current().world
    shares = dict[str, float]()
    for dtype, unit in UNIT.items():
        seeds = (torch.Generator().manual_seed(rank) for rank in range(world.size))  # every rank draws all of them
        grads = [torch.randn(numel * world.size, generator=seed).to(device, dtype) for seed in seeds]
        links = make_collectives(world, device)
        parts = torch.stack([links.own_part(grad) for grad in grads])
        name = str(dtype).removeprefix("torch.")

        bucket = grads[world.rank].clone()
        links.reduce_scatter(bucket, links.own_part(bucket)).wait()
        bound = world.size * unit * parts.double().abs().sum(0) + 2.0**-24
        off = (links.own_part(bucket).double() - parts.double().sum(0)).abs() / bound
        shares[f"sum of {name}"] = float(off.nan_to_num(math.inf).max())

        bucket, (want, wide) = grads[world.rank].clone(), torch.empty(2, numel, device=device)
        sum_in_rank_order(parts, want)
        links.reduce_scatter(bucket, links.own_part(bucket), partial(sum_in_rank_order, out=wide)).wait()
        shares[f"FP32 sum of {name} in rank order"] = 0.0 if torch.equal(wide, want) else math.inf

        flat = torch.zeros_like(bucket)
        links.own_part(flat).copy_(links.own_part(grads[world.rank]))
        links.all_gather(flat, links.own_part(flat)).wait()
        whole = torch.cat([grad.view(world.size, -1)[rank] for rank, grad in enumerate(grads)])
        shares[f"gather of {name}"] = 0.0 if torch.equal(flat, whole) else math.inf
    return shares


def wire_rates(numel: int) -> dict[str, float]:
    """Return the bytes/s that each rank sends, by collective, with buckets of `numel` BF16 elements."""
    device, world = rank_device(), Topology.current().world
    links = make_collectives(world, device)
    flat = torch.zeros(numel, dtype=torch.bfloat16, device=device)
    own, sent = links.own_part(flat), 2 * numel * (world.size - 1) / world.size
    works = {
        "reduce-scatter": lambda: links.reduce_scatter(flat, own).wait(),
        "all-gather": lambda: links.all_gather(flat, own).wait(),
    }
    return {name: sent / seconds_of(work, 5) for name, work in works.items()}


def blocks_off(tokens: int, width: int) -> dict[str, float]:
    """Return by parameter how far its gradient in a compiled block is from FP64's, as a share of its bounds.

    The bound of an element is NOISE times the largest error without a compiler, plus one rounding of the largest
    element. The bound of the whole gradient, along the right one, is _SIZE.
    """
    device, shares = rank_device(), dict[str, float]()
    dtype = half_of(device.type)
    draw = partial(torch.randn, tokens // _SEQ, _SEQ, width, generator=torch.Generator().manual_seed(1))
    x, upstream = draw().to(device, dtype), draw().to(device, dtype)

    def gradients(model: Transformer, dtype: torch.dtype) -> dict[str, Tensor]:
        block, leaf = model.blocks[0], x.to(dtype, copy=True).requires_grad_()
        inputs = {"the input": leaf} | dict(block.named_parameters())
        result = block(leaf, model.rotary(_SEQ), None, None)  # type: ignore[misc]  # it has rotary tables
        grads = torch.autograd.grad(result, [*inputs.values()], upstream.to(dtype))
        return {name: grad.double() for name, grad in zip(inputs, grads, strict=True)}

    for kind, settings in _BLOCKS.items():
        make = partial(_one_block, device, dtype, width, **settings)
        exact = gradients(make().double(), torch.float64)
        plain, found = gradients(make(), dtype), gradients(make(compile=True), dtype)
        for name, want in exact.items():
            bound = NOISE * (plain[name] - want).abs().max() + UNIT[dtype] * want.abs().max()
            size = (found[name] * want).sum() / want.square().sum() - 1
            off = torch.stack([(found[name] - want).abs().max() / bound, size.abs() / _SIZE])
            shares[f"{kind} {name}"] = float(off.max().nan_to_num(math.inf))
    return shares


def _one_block(device: torch.device, dtype: torch.dtype, width: int, **settings: Any) -> Transformer:
    """Return a model of one block, whose parameters are slices of one half buffer, as the engine's are."""
    settings |= {"vocab_size": 16, "seq_len": _SEQ, "hidden_size": width, "num_layers": 1, "num_heads": width // 64}
    torch.manual_seed(0)
    with device:
        model = Transformer(ModelConfig(**settings))
    params = [*model.blocks.parameters()]
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(params).detach().to(dtype), params)
    return model


def make_step(side: Engine, work: Work) -> Callable[[], Tensor]:
    """Return a function that makes a step and returns its loss. It never leaves the device. All steps have the same
    sequences, which can be learnt by heart.
    """
    draw, shape = torch.Generator().manual_seed(0), (work.micro_batch_size, work.model.seq_len + 1)
    tokens = torch.randint(work.model.vocab_size, shape, generator=draw).to(work.device)

    def step() -> Tensor:
        loss = side.forward_backward(tokens[:, :-1], tokens[:, 1:])
        side.optimize()
        side.finish()
        return loss

    return step


def waits() -> dict[str, float]:
    """Take steps in which every wait of the host for the device is an error. Raises: RuntimeError."""
    work = Work(model=_TINY, device=rank_device().type)
    step = make_step(Ours(work), work)
    step(), step()
    try:
        torch.cuda.set_sync_debug_mode("error")
        step(), step()
    finally:  # later checks wait on this rank, too
        torch.cuda.set_sync_debug_mode("default")
    return {"waits in two steps": 0.0}


def device_rates(side: int, numel: int) -> tuple[dict[str, float], list[Card]]:
    """Return this rank's rates by check, and the driver's answers on the cards while products run.

    Rates: operations/s of half matrix products (FP32 on a CPU), and bytes/s read and written by a copy. `side`: rows of
    the square matrices. `numel`: FP32 elements to copy.
    """
    device = rank_device()
    a = torch.randn(side, side, device=device).to(torch.float32 if device.type == "cpu" else half_of("cuda"))
    source, target, out = torch.ones(numel, device=device), torch.zeros(numel, device=device), torch.empty_like(a)
    rates = {
        "products": 2 * side**3 / seconds_of(lambda: torch.mm(a, a, out=out), 10),
        "copy": 8 * numel / seconds_of(lambda: target.copy_(source), 5),
    }
    if device.type == "cpu":
        return rates, []
    for _ in range(1000):  # keeps the card busy for a second or more, while the driver is asked
        torch.mm(a, a, out=out)
    return rates, probe_cards()[0]


def train_rate(work: Work, side: str, steps: int) -> tuple[float, Work]:
    """Return this rank's tokens/s in whole steps of one of COMPARED, and the work: as much of it as its card holds."""
    if work.device == "cuda":
        work = fitted(work, torch.cuda.get_device_properties(rank_device()).total_memory)
    rank = TrainRank(Side(side, SIDES[side], steps=steps, warm_up_steps=3), work)
    return work.micro_batch_size * work.model.seq_len / rank.turn().seconds, work


def seconds_by_source(numel: int) -> list[tuple[int, float]]:
    """Return (other rank, seconds that this rank takes to receive its bytes) for every other rank.

    Ranks exchange in pairs, and one of two sends at a time: ranks that wait for a slow link would hold up those that
    wait for them.
    """
    world, taken = Topology.current().world, list[tuple[int, float]]()
    message = torch.zeros(numel, dtype=torch.uint8, device=rank_device())

    def move(operation: Callable[..., object], other: int) -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(operation, message, other)]):
            work.wait()

    for bits in range(1, 1 << (world.size - 1).bit_length()):
        other = world.rank ^ bits  # partner in this round; the partner's partner is this rank
        for lower_sends in (True, False):
            dist.barrier()
            if other >= world.size:
                continue
            sends = (world.rank < other) == lower_sends
            seconds = seconds_of(partial(move, dist.isend if sends else dist.irecv, other), 3)
            taken += [] if sends else [(other, seconds)]
    return taken
