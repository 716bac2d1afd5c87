"""The work of one step, as the time model reads it: a model, and how ranks divide it."""

from __future__ import annotations

from dataclasses import dataclass

from megamix.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Recompute:
    """Shares of a forward that backward repeats."""

    products: float = 0.0  # but for a block's last, whose result nobody needs
    attention: float = 0.0
    between: float = 0.0  # operations between products


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Counts what data-parallel ranks send in a step, and what an update moves."""

    gathers: int  # of all parameters, in a step
    reductions: int  # of all gradients, in a step
    pieces: int  # collectives that make up one gather or reduction
    hidden_by: int  # micro-batches whose forward and backward can hide it
    gather_bytes: float = 2.0  # a parameter
    reduce_bytes: float = 2.0
    update_bytes: float  # that the update reads and writes, a parameter
    cast_bytes: float = 0.0  # that a forward or backward moves for casts of weights, a parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedJob:
    """Work of one step and its division among ranks."""

    model: ModelConfig
    micro_batch: int  # sequences of one forward of one rank
    global_batch: int  # sequences of a step
    dp: int = 1  # ranks that share out the masters
    replicas: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    tp_overlap: bool = False  # whether products run while their operands travel
    tp_whole: bool = False  # whether tensor-parallel ranks hold all positions between layers
    schedule: str = "1f1b"  # as parallelism.pipeline.schedule
    stages: int = 1  # of one pipeline rank
    cp_heads: bool = False  # whether context-parallel ranks exchange heads instead of keys and values
    # How operations between products run: "compiled", each block through a compiler; "fused", one kernel an operation;
    # or "eager", torch's many.
    kernels: str = "compiled"
    recompute: Recompute = Recompute()
    fp8: float = 0.0  # share of the layers whose products are in FP8
    fp8_weights: bool = False  # whether the products that make gradients of weights are, too
    fused_projections: bool = False  # whether query, key and value are one product
    traffic: Traffic
    muon: bool = False

    @property
    def gpus(self) -> int:
        return self.dp * self.replicas * self.tp * self.pp * self.cp

    @property
    def micro_batches(self) -> int:
        """Forwards of one rank in a step."""
        return max(1, self.global_batch // (self.micro_batch * self.dp * self.replicas))

    @property
    def step_tokens(self) -> int:
        return self.global_batch * self.model.seq_len
