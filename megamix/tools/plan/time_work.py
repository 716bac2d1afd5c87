"""The work of one step, as the time model reads it: a model's shape, and how ranks divide it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# How operations between products run: each block through a compiler, one kernel an operation, or torch's many.
Kernels = Literal["compiled", "fused", "eager"]
Schedule = Literal["1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """Experts of each layer behind the dense ones."""

    count: int
    top_k: int
    ffn: int  # inner width of one expert
    shared_ffn: int = 0
    dense_layers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder-only transformer."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # inner width
    gated: bool  # whether the feed-forward part multiplies two projections
    vocab: int
    tied: bool
    rotary: bool
    norms: int = 2  # of a layer
    fused_projections: bool = False  # whether query, key and value are one product
    experts: ExpertShape | None = None

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def expert_layers(self) -> int:
        return 0 if self.experts is None else self.layers - self.experts.dense_layers

    @property
    def active_inner(self) -> float:
        """Inner width that a token passes, the mean over all layers."""
        return self._ffn_mean(active=True) / (self.hidden * (3 if self.gated else 2))

    @property
    def layer_matrices(self) -> float:
        """Elements of the matrices of a layer, the mean over all layers."""
        return self._attention + self._ffn_mean(active=False)

    @property
    def parameters(self) -> float:
        """Elements of all matrices and tables."""
        return self.layers * self.layer_matrices + self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def active_matrices(self) -> float:
        """Elements that multiply each token, the head's included."""
        return self.layers * (self._attention + self._ffn_mean(active=True)) + self.vocab * self.hidden

    @property
    def tensors(self) -> int:
        """Parameters as an engine counts them, about."""
        return self.layers * (4 + self.norms + (3 if self.gated else 2)) + 3

    @property
    def _attention(self) -> int:
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    def _ffn_mean(self, *, active: bool) -> float:
        matrices = self.hidden * (3 if self.gated else 2)
        if (experts := self.experts) is None:
            return matrices * self.ffn
        inner = (experts.top_k if active else experts.count) * experts.ffn + experts.shared_ffn
        dense = self.layers - self.expert_layers
        return matrices * (dense * self.ffn + self.expert_layers * inner) / self.layers


@dataclass(frozen=True, slots=True)
class Recompute:
    """Shares of a forward that backward repeats."""

    products: float = 0.0  # but for a block's last, whose result nobody needs
    attention: float = 0.0
    between: float = 0.0  # operations between products


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What data-parallel ranks send in a step, and what an update moves."""

    gathers: int  # of all parameters, in a step
    reductions: int  # of all gradients, in a step
    pieces: int  # collectives that make up one gather or reduction
    hidden_by: int  # micro-batches whose forward and backward can hide it
    gather_bytes: float = 2.0  # a parameter
    reduce_bytes: float = 2.0
    update_bytes: float = 28.0  # that the update reads and writes, a parameter
    cast_bytes: float = 0.0  # that a forward or backward moves for casts of weights, a parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedJob:
    """Work of one step and its division among ranks."""

    shape: ModelShape
    seq: int  # tokens of a sequence
    keys: float  # of a query, the mean over layers, as the FLOP rule counts: the causal half is not subtracted
    micro_batch: int  # sequences of one forward of one rank
    global_batch: int  # sequences of a step
    dp: int = 1  # ranks that share out the masters
    replicas: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    tp_overlap: bool = False  # whether products run while their operands travel
    schedule: Schedule = "1f1b"
    stages: int = 1  # of one pipeline rank
    cp_heads: bool = False  # whether context-parallel ranks exchange heads instead of keys and values
    kernels: Kernels = "compiled"
    recompute: Recompute = Recompute()
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
        return self.global_batch * self.seq

    @property
    def token_flops(self) -> float:
        """Operations of a token, forward and backward: 6 for each element that multiplies it, and attention's; nothing
        for recomputation or lookups.
        """
        attention = 12 * self.shape.layers * self.shape.attention_width * self.keys
        return 6 * self.shape.active_matrices + attention
