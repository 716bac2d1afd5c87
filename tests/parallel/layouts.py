"""A few steps of a small model on any mesh, and the differences from one process: for tests of layouts."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megamix import AdamW, Precision, ShardedEngine, Sharding, StaticLossScale
from megamix.comm.topology import Topology
from megamix.config import ModelConfig, ParallelismConfig
from megamix.mixed_precision.flat_layout import ParamSpec
from megamix.parallel.build import build_model, drawn
from megamix.tools.verify.core.observed_step import rank_device

VOCAB, SEQ_LEN, BATCH, STEPS = 64, 16, 2, 2
ROUNDINGS = 32  # see first_difference
GPT = {"norm": "layernorm", "rope": False, "activation": "gelu", "bias": True}
LLAMA = {"num_kv_heads": 2, "ffn_hidden_size": 64, "qk_norm": "head"}
# An eps of the gradients' size: where both moments are far below it, as of a gradient that is zero but for rounding,
# AdamW would turn a rounding into a whole step.
OPTIMIZER = AdamW(lr=0.01, eps=1e-2)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One layout of one model; `alone` is what it must equal."""

    model: str = "gpt"
    tied: bool = True
    dtype: torch.dtype = torch.float32
    dp_size: int = 1
    cp_size: int = 1
    tp_size: int = 1
    sequence_parallel: bool = True
    grad_accum_steps: int = 1
    dropout: float = 0.0
    recompute: str = "none"
    reduce_dtype: str | None = None
    clip_grad: float = 0.05
    bucket_size: int | None = 3000  # several buckets of either kind

    @property
    def world_size(self):
        return self.dp_size * self.cp_size * self.tp_size

    @property
    def alone(self):
        """Return the case with the same samples in one process, in the same micro-batches."""
        accumulation = self.grad_accum_steps * self.dp_size
        return replace(self, dp_size=1, cp_size=1, tp_size=1, grad_accum_steps=accumulation, bucket_size=None)

    def parallelism(self):
        tensor = {"size": self.tp_size, "sequence_parallel": self.sequence_parallel} if self.tp_size > 1 else None
        return ParallelismConfig(tensor=tensor, context={"size": self.cp_size} if self.cp_size > 1 else None)

    def config(self):
        kind = GPT if self.model == "gpt" else LLAMA
        return ModelConfig(
            vocab_size=VOCAB, seq_len=SEQ_LEN, hidden_size=48, num_layers=2, num_heads=4, tie_embeddings=self.tied,
            dropout=self.dropout, recompute=self.recompute, **kind,
        )  # fmt: skip


class Owned(NamedTuple):
    """A run of elements that one rank owns, with its kind and parameter."""

    spec: ParamSpec
    start: int
    values: Tensor


@dataclass
class Outcome:
    """The outcome on one rank: values that all ranks know, and its own part of everything else, by kind."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    owned: dict[str, list[Owned]] = field(default_factory=dict)


def build(case, optimizer=OPTIMIZER):
    topology = Topology.connect(cp=case.cp_size, tp=case.tp_size)
    device = rank_device()
    model, placements = build_model(case.config(), case.parallelism(), topology, device)
    scale = StaticLossScale(2.0**10) if case.dtype == torch.float16 else None
    sharding = Sharding([*model.blocks], topology, case.bucket_size, placements=placements)
    engine = ShardedEngine(
        model, optimizer, Precision(case.dtype, loss_scale=scale, reduce_dtype=case.reduce_dtype), sharding,
        clip_grad=case.clip_grad, grad_accum_steps=case.grad_accum_steps, compile_update=False,
        fill=drawn(model, 0),
    )  # fmt: skip
    return model, engine


def backward(case, engine, step):
    """Run backward of all micro-batches of one step."""
    for micro_batch in range(case.grad_accum_steps):
        number = engine.topology.dp.rank * case.grad_accum_steps + micro_batch  # the same samples on any mesh
        generator = torch.Generator().manual_seed(1000 * step + number)
        tokens = torch.randint(VOCAB, (BATCH, SEQ_LEN + 1), generator=generator)
        torch.manual_seed(number)  # the seed of dropout
        engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))


def train(case, steps=STEPS):
    """Train the case on this rank."""
    _, engine = build(case)
    outcome = Outcome()
    for step in range(steps):
        backward(case, engine, step)
        result = engine.step()
        outcome.losses.append(result.loss.item())
        outcome.grad_norms.append(result.grad_norm.item())
        if step == 0:  # later ones belong to other weights
            outcome.owned |= gradients(engine)
    outcome.owned |= states(engine)
    return outcome


def gradients(engine):
    """Return the gradients of the last step: summed, without the loss scale, before clipping."""
    scale = engine.loss_scale.loss_scale * engine.grad_accum_steps * engine.topology.dp.size
    found = []
    for bucket in engine.buckets:
        for piece in bucket.pieces:
            if piece.numel:
                found.append(Owned(piece.spec, piece.first, (bucket.grad_sum[piece.elements].float() / scale).cpu()))
    return {"gradient": found}


def states(engine):
    """Return masters and moments."""
    found = {}
    for owned in engine.owned_ranges():
        for name, values in owned.tensors.items():
            found.setdefault(name, []).append(Owned(owned.spec, owned.start, values.to("cpu", copy=True)))
    return found


def contents(engine):
    """Return copies of masters, moments and half parameters: all that an overflow must not change."""
    owned = [one.values for kind in states(engine).values() for one in kind]
    return owned + [bucket.params.clone() for bucket in engine.buckets]


def are_equal(some, others):
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def with_one_inf(grad):
    """Return a gradient with inf in its first row: a hook for a parameter."""
    return grad.index_fill(0, torch.tensor([0], device=grad.device), torch.inf)


def assemble(ranks):
    """Return (full tensors by name; the names of those with an element that not exactly one rank owns)."""
    full = {}
    owners = {}
    for spec, start, values in (owned for rank in ranks for owned in rank):
        for target, part in ((full, values), (owners, torch.ones_like(values))):
            block = torch.zeros(spec.numel)
            block[start : start + len(part)] = part
            target.setdefault(spec.name, torch.zeros(spec.full_shape))[spec.block] += block.view(spec.shape)
    return full, [name for name, count in owners.items() if not (count == 1).all()]


def same_everywhere(outcomes):
    told = [(outcome.losses, outcome.grad_norms) for outcome in outcomes]
    return all(other == told[0] for other in told)


def world_rank():
    return dist.get_rank() if dist.is_initialized() else 0


def first_difference(case, outcomes, alone):
    """Return the first difference from one process, by name and size; None if there is none.

    Both round every value of the model's two blocks about 12 times on the way there and 12 on the way back, by up to u
    of the dtype, and a divided layer rounds its partial sums once more. Errors of random sign add up to sqrt(2 * 48) u,
    10 u, of a value's own size; three times that, for the worst of some 50,000 elements, is ROUNDINGS u of the largest
    one. A gradient that is zero but for rounding has no other size to be measured by. Measured: up to 8 u.
    """
    bound = ROUNDINGS * torch.finfo(case.dtype).eps / 2
    told = []
    for step in range(STEPS):
        told += [_number(what, step, outcomes[0], alone, bound) for what in ("grad_norms", "losses")]
    told += [_tensors(kind, outcomes, alone, bound * size) for kind, size in _sizes(case, alone)]
    return next((line for line in told if line is not None), None)


def _sizes(case, alone):
    """Return for every kind of tensor the size by which its errors are measured."""
    largest = {kind: max(float(owned.values.abs().max()) for owned in parts) for kind, parts in alone.owned.items()}
    # A square is off by twice as much. The update is at most lr / eps times the first moment, so a master that has been
    # updated STEPS times is off by at most that factor times what its gradients were off.
    moved = STEPS * OPTIMIZER.lr / OPTIMIZER.eps * case.clip_grad
    first, second = largest["exp_avg"], largest["exp_avg_sq"]
    return [("gradient", largest["gradient"]), ("exp_avg", first), ("exp_avg_sq", 2 * second), ("master", moved)]


def _number(what, step, outcome, alone, bound):
    one, other = getattr(outcome, what)[step], getattr(alone, what)[step]
    return None if abs(one - other) <= bound * abs(other) else f"{what} of step {step}: {one}, alone {other}"


def _tensors(kind, outcomes, alone, limit):
    found, shared = assemble([outcome.owned[kind] for outcome in outcomes])
    if shared:
        return f"{kind}: not owned once: {shared}"
    want, _ = assemble([alone.owned[kind]])
    for name, values in want.items():
        gap = float((found[name] - values).abs().max())
        if not gap <= limit:
            return f"{kind} of {name}: {gap:.2e} apart, {limit:.2e} allowed"
    return None
