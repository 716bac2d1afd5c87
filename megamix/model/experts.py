"""The experts of a transformer's block: each token passes a few of many feed-forward parts, and none is dropped.

A router scores the experts for each token. A token's hidden state is copied into a row for each of its experts, and
rows are sorted by expert, so that each expert computes one product. Experts' matrices lie in stacks (experts, out, in).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from megamix.base.added_loss import add_loss
from megamix.base.records import record
from megamix.base.tally import Counts, Tally
from megamix.config import ExpertsConfig, ModelConfig
from megamix.model import sizes
from megamix.model.feed_forward import FeedForward, activate
from megamix.model.layers import ParamRule
from megamix.model.ops import Groups, Ops
from megamix.model.recompute import recomputed
from megamix.model.wide import Crossing, apply, rounded


class Routes(NamedTuple):
    """The experts of each token. A token has a copy for each of its experts, the best first; copies become rows, which
    are sorted by expert.
    """

    experts: Tensor  # INT64 (tokens, top_k)
    weights: Tensor  # FP32 (tokens, top_k): factors of the experts' outputs
    counts: Tensor  # INT64 (experts,): copies for each expert
    loss: Tensor | None  # FP32 (): what is added to the loss for balance and for small logits


@dataclass(frozen=True, slots=True)
class SortedRows:
    """The rows of tokens' copies, and the way back. A token's rows are added in FP32, and rounded once."""

    order: Tensor  # INT64 (rows,): the copy in each row, token * top_k + place among the token's experts
    row_of: Tensor  # INT64 (tokens, top_k): the row of each copy

    @staticmethod
    def sorted_by(experts: Tensor) -> SortedRows:
        """Return the rows of copies, whose experts are INT64 (tokens, top_k). An expert's tokens stay in order."""
        order = experts.flatten().argsort(stable=True)
        row_of = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return SortedRows(order, row_of.view(experts.shape))

    def spread(self, x: Tensor) -> Tensor:
        """Return the rows of tokens. Shapes: (tokens, hidden_size) -> (rows, hidden_size)."""
        return x.index_select(0, self.order // self.row_of.shape[1])

    def join(self, rows: Tensor) -> Tensor:
        """Return the sum of each token's rows. Shapes: (rows, hidden_size) -> (tokens, hidden_size)."""
        first, *others = self.row_of.unbind(1)
        total = rows.index_select(0, first).to(torch.promote_types(rows.dtype, torch.float32))
        for other in others:
            total = total + rows.index_select(0, other)
        return rounded(total, rows.dtype)


# Takes rows, sorted by expert, FP32 (rows,) factors and INT64 (experts,) numbers of rows; returns the outputs times the
# factors.
Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
# Takes tokens (tokens, hidden_size), their routes, and what computes the rows of the experts that are here.
AtExperts = Callable[[Tensor, Routes, Compute], Tensor]


def at_own_experts(x: Tensor, routes: Routes, compute: Compute) -> Tensor:
    """Return the sums of the experts' outputs, all of which are here. Shapes: (tokens, hidden_size) -> the same."""
    rows = SortedRows.sorted_by(routes.experts)
    spread = apply(Crossing, x, rows.spread, rows.join)
    out = compute(spread, routes.weights.flatten()[rows.order], routes.counts)
    return apply(Crossing, out, rows.join, rows.spread)


class Router(nn.Module):
    """Chooses each token's experts by its score for each, in FP32, and weighs their outputs by it.

    `balance` adds a bias to the scores in the choice alone. An expert's bias rises while it gets fewer tokens than the
    mean (Wang et al. 2024, arXiv:2408.15664; DeepSeek-V3, arXiv:2412.19437, section 2.1.2). With `bias_rate` 0 it only
    counts.
    """

    def __init__(self, config: ModelConfig, experts: ExpertsConfig, ops: Ops) -> None:
        super().__init__()
        self.experts, self.ops = experts, ops
        self.flops = 6 * config.hidden_size * experts.num_experts
        self.weight = nn.Parameter(torch.empty(experts.num_experts, config.hidden_size))
        self.rules = {"weight": ParamRule("normal", config.init_std)}
        rate = experts.bias_rate
        rule = partial(towards_mean, rate)
        self.balance = Tally(experts.num_experts, rule) if rate else Counts(experts.num_experts)

    @property
    def biases(self) -> Tensor | None:
        """Return what is added to the scores in the choice, FP32 (experts,); None: nothing is."""
        return self.balance.value if isinstance(self.balance, Tally) else None

    def forward(self, x: Tensor) -> Routes:
        """Return the routes of all tokens. Shapes: x (B, T, hidden_size); tokens are B * T."""
        logits = self.ops.scores(x, self.weight)
        scores = self.scores(logits)
        chosen = self.choose(scores.detach() if self.biases is None else scores.detach() + self.biases)
        loads = _count(chosen, self.experts.num_experts)
        counts = loads.sum(0)
        self.balance.add(counts)
        weights = scores.gather(-1, chosen)
        if self.experts.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        loss = self._loss(logits, scores, loads) if self.training and torch.is_grad_enabled() else None
        return Routes(chosen.flatten(0, 1), (weights * self.experts.scale).flatten(0, 1), counts, loss)

    def scores(self, logits: Tensor) -> Tensor:
        """Return the scores, all above 0. Shapes: FP32 (..., experts) -> the same."""
        return logits.softmax(-1) if self.experts.score == "softmax" else logits.sigmoid()

    def choose(self, ranking: Tensor) -> Tensor:
        """Return each token's experts, the best first. `ranking`: scores and biases, FP32 (..., experts) -> INT64 (...,
        top_k).
        """
        return self._within_groups(ranking).topk(self.experts.top_k, -1).indices

    def _within_groups(self, ranking: Tensor) -> Tensor:
        """Return the ranking, -inf outside of a token's groups (DeepSeek-V3, section 2.1.2, node-limited routing)."""
        if self.experts.groups is None:
            return ranking
        groups = ranking.view(*ranking.shape[:-1], self.experts.groups.count, -1)
        of_groups = groups.topk(min(2, groups.shape[-1]), -1).values.sum(-1)
        chosen = of_groups.topk(self.experts.groups.top, -1).indices
        outside = torch.ones_like(of_groups, dtype=torch.bool).scatter(-1, chosen, False)
        return groups.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(-2)

    def _loss(self, logits: Tensor, scores: Tensor, loads: Tensor) -> Tensor | None:
        """Return the loss of unequal loads within each sequence (DeepSeek-V3, equations 17 to 20), and that of large
        logits (Zoph et al. 2022, ST-MoE, equation 5). Each is a mean over this rank's tokens.

        Shapes: loads INT64 (B, experts).
        """
        losses = dict[str, Tensor]()
        if self.experts.balance_loss:
            whole = self.ops.over_sequence(self.ops, loads).to(scores.dtype)
            shares = (scores / scores.sum(-1, keepdim=True)).mean(1)
            unequal = (whole / whole.mean(-1, keepdim=True) * shares).sum(-1).mean()
            losses["router/balance_loss"] = self.experts.balance_loss * unequal
        if self.experts.z_loss:
            losses["router/z_loss"] = self.experts.z_loss * logits.logsumexp(-1).square().mean()
        for name, loss in losses.items():
            record(name, loss)
        return torch.stack([*losses.values()]).sum() if losses else None


def _count(chosen: Tensor, num_experts: int) -> Tensor:
    """Return how often each expert is chosen in a sequence. Shapes: INT64 (B, T, top_k) -> INT64 (B, experts)."""
    flat = chosen.flatten(1)
    return flat.new_zeros(len(flat), num_experts).scatter_add_(1, flat, torch.ones_like(flat))


def towards_mean(rate: float, bias: Tensor, counts: Tensor) -> Tensor:
    """Return the biases after a step, FP32 (experts,): each moves by `rate` towards an equal count, and their mean
    stays.
    """
    step = rate * (counts.mean() - counts).sign()
    return bias + (step - step.mean())


class Stack(nn.Module):
    """A linear layer of each expert: rows (rows, in), sorted by expert -> (rows, out). The weight is (experts, out,
    in). `top_k`: the experts that a token passes, for its cost.
    """

    holds_maps: ClassVar[bool] = True  # for Muon: each expert's matrix is one by itself

    def __init__(self, num_experts: int, in_features: int, out_features: int, top_k: int, ops: Ops, std: float) -> None:
        super().__init__()
        self.ops, self.flops = ops, 6 * in_features * out_features * top_k
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))
        self.rules = {"weight": ParamRule("normal", std, 0, "ep")}

    def forward(self, rows: Tensor, groups: Groups) -> Tensor:
        return self.ops.grouped_linear(rows, self.weight, groups)


class Experts(nn.Module):
    """The feed-forward parts of all experts, their router, and the part that every token passes, if there is one."""

    def __init__(self, config: ModelConfig, experts: ExpertsConfig, ops: Ops) -> None:
        super().__init__()
        self.ops, self.activation = ops, config.activation
        self.selective = config.recompute == "selective"
        self.router = Router(config, experts, ops)
        size, inner, std = config.hidden_size, experts.ffn_hidden_size, config.init_std
        stack = partial(Stack, experts.num_experts, top_k=experts.top_k, ops=ops)
        self.gate = stack(size, inner, std=std) if sizes.is_gated(config.activation) else None
        self.up = stack(size, inner, std=std)
        self.down = stack(inner, size, std=sizes.branch_end_std(config))
        shared = experts.shared_ffn_hidden_size
        self.shared = FeedForward(config, ops, shared) if shared else None
        # Ranks that divide the experts put their own way in its place. It is not compiled: sizes that differ in each
        # forward would make a graph each.
        self.at_experts: AtExperts = torch.compiler.disable(at_own_experts) if config.compile else at_own_experts  # type: ignore[no-untyped-call]  # untyped in torch

    def forward(self, x: Tensor) -> Tensor:
        routes = self.router(x)
        out = self.at_experts(x.flatten(0, 1), routes, self._compute).view(x.shape)
        out = out if self.shared is None else out + self.shared(x)
        return out if routes.loss is None else add_loss(out, routes.loss)

    def _compute(self, rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """Return the experts' outputs times the rows' factors. Backward then needs no output of an expert."""
        groups = self.ops.groups(rows, counts, *self.up.weight.shape[1:])
        widened = [self.up(rows, groups)] if self.gate is None else [self.gate(rows, groups), self.up(rows, groups)]
        with recomputed(self.selective, partial(self._weighted, weights, *widened)) as (inner,):
            down: Tensor = self.down(inner, groups)
        return down

    def _weighted(self, weights: Tensor, *widened: Tensor) -> Tensor:
        with recomputed(self.selective, partial(activate, self.ops, self.activation, *widened)) as (inner,):
            return (inner * weights.unsqueeze(-1)).to(inner.dtype)
