"""Comparisons of what routers do outside of gradients: scores, choices, counts, and the biases that counts move."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megamix.base.tally import Tally
from megamix.config import ExpertsConfig
from megamix.tools.verify.core.choices import Choices, routers
from megamix.tools.verify.core.hypotheses import RightStep
from megamix.tools.verify.core.observed_step import ObservedStep
from megamix.tools.verify.core.reference import Step
from megamix.tools.verify.core.verdict import NOISE, U32, Tensors, Verdict, max_abs

ByRank = Sequence[Sequence[Choices]]  # those of each micro-batch of each data-parallel rank


def tallies(model: nn.Module) -> dict[str, Tally]:
    return {f"{name}.value": module for name, module in model.named_modules() if isinstance(module, Tally)}


def judge_scores(verdict: Verdict, right: RightStep, ranks: Sequence[ObservedStep]) -> None:
    """Compare each router's scores with FP64's of the router's own input, and its choices with these scores.

    Bound of a score: a router computes in FP32 whatever the model's dtype, so NOISE times its error on one rank, and a
    rounding of the score and one of its sum with the bias. A choice is that of the best, exactly.
    """
    reference = right.reference
    models = reference.native, reference.exact
    for model in models:
        reference.put(model, right.weights)
    for name, router in routers(reference.native).items():
        for rank, seen in enumerate(ranks):
            for kept in seen.choices.get(name, ()):
                native, want = (reference.routers[model][name].score(kept.x) for model in models)
                bound = NOISE * max_abs(native - want) + 2 * U32 * max_abs(want)
                error = max_abs(kept.ranking.double() - want)
                verdict.note("scores", f"{name} on rank {rank}", error, bound)
                short = float(shortfall(kept.ranking, kept.experts, router.experts).max())
                verdict.note("choice of experts", f"{name} on rank {rank}", short, 0.0, "not by its own scores")


def judge_choices(verdict: Verdict, model: nn.Module, by_rank: ByRank, exact: Step, native: Step) -> None:
    """Check that each token's experts are its best by FP64, as far as rounding can tell.

    Bound: two scores may each be off by NOISE times the largest error of the router's scores on one rank, which has the
    same choices in all layers.
    """
    for name, router in routers(model).items():
        rankings = [[of[name] for of in step.rankings] for step in (exact, native)]
        noise = max(max_abs(one - other) for one, other in zip(*rankings, strict=True))
        left, bound = iter(rankings[0]), 2 * NOISE * noise
        for rank, mine in enumerate(by_rank):
            for choices in mine:
                ranking, chosen = next(left), choices[name]
                short = shortfall(ranking, chosen, router.experts)
                verdict.tokens += short.numel()
                verdict.elsewhere += int((short > 0).sum())
                where = f"{name} for the tokens of data-parallel rank {rank}"
                verdict.note("choice of experts", where, float(short.max()), bound)


def shortfall(ranking: Tensor, chosen: Tensor, experts: ExpertsConfig) -> Tensor:
    """Return by how much each token's worst expert is behind the best one that it did not get; at least 0.

    With groups, experts are compared within the groups of the token's experts, and these groups with the others, by
    half the difference of their sums of two. Infinite: the token got an expert twice, or too many groups.
    Shapes: ranking (..., experts), chosen INT64 (..., top_k) -> (...).
    """
    got = torch.zeros_like(ranking, dtype=torch.bool).scatter(-1, chosen, True)
    among = torch.ones_like(got)
    wrong = got.sum(-1) != experts.top_k
    short = torch.zeros_like(ranking[..., 0])
    if experts.groups is not None:
        size = ranking.shape[-1] // experts.groups.count
        groups, held = (torch.unflatten(x, -1, (-1, size)) for x in (ranking, got))
        held = held.any(-1)
        among = held.repeat_interleave(size, -1)
        sums = groups.topk(min(2, size), -1).values.sum(-1)
        # Groups without a token's expert may be among its groups, too; they are the best of the others.
        empty = experts.groups.top - held.sum(-1)
        wrong |= empty < 0
        others = sums.masked_fill(held, -torch.inf).sort(-1, descending=True).values
        others = torch.cat((others, torch.full_like(others[..., :1], -torch.inf)), -1)
        best_other = others.gather(-1, empty.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        short = (best_other - sums.masked_fill(~held, torch.inf).amin(-1)) / 2
    best = ranking.masked_fill(got | ~among, -torch.inf).amax(-1)
    short = torch.maximum(short, best - ranking.masked_fill(~got, torch.inf).amin(-1))
    return short.clamp(min=0).masked_fill(wrong, math.inf)


def judge_tallies(
    verdict: Verdict, model: nn.Module, before: Tensors, ranks: Sequence[ObservedStep], by_rank: ByRank, skipped: bool
) -> Tensors:
    """Check that every rank has the counts of all ranks' choices, and that each tally follows its rule from the value
    before by the counts, bit for bit. A skipped step moves none.

    Return the tallies' values, each of the first rank that has it.
    """
    for name, router in routers(model).items():
        chosen = torch.cat([of[name].flatten() for mine in by_rank for of in mine])
        counts, tally_name = chosen.bincount(minlength=router.experts.num_experts), f"{name}.balance"
        for rank, seen in enumerate(ranks):
            if tally_name in seen.tallied:
                verdict.equal("counts", f"{tally_name} on rank {rank}", seen.tallied[tally_name], counts)
    device = next(model.parameters()).device  # another device may add in another order
    text, after = "moved by a step that is none" if skipped else "", Tensors()
    for value, tally in tallies(model).items():
        holders = {rank: seen for rank, seen in enumerate(ranks) if value in seen.buffers}
        first = next(iter(holders.values()))
        after[value], told = first.buffers[value], first.tallied[value.removesuffix(".value")]
        want = before[value] if skipped else tally.moved(before[value].to(device), told.to(device)).cpu()
        for rank, seen in holders.items():
            verdict.equal("tally", f"{value} on rank {rank}", seen.buffers[value], want, text)
    return after
