"""Measurements by ranks of this machine, beside the figures expected of them and of their cards."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from megamix.model.family import flops_per_token
from megamix.model.sizes import dense_peak
from megamix.tools.bench.sides import SIZES, Work, how_multiplied
from megamix.tools.doctor import ranks
from megamix.tools.doctor.cards import Card, judge_cards
from megamix.tools.doctor.finding import Finding, expected, found, not_here
from megamix.tools.ranks import RankPool

Case = Mapping[str, Any]  # a model to train beside torch's own ways, as expected.toml has it
Check = Callable[[float], list[Finding]]  # takes a limit in seconds


def checks(facts: Mapping[str, Any], stack: ExitStack) -> dict[str, tuple[Check | None, float]]:
    """Return the checks by name, each with the seconds that it may take; None for a check that this device cannot have.

    They run on one rank for each card, or on two ranks without cards. The ranks live until the end of `stack`. `facts`:
    what torch tells of itself and its cards.
    """
    cards = facts["cards"]
    on_gpus, size = bool(cards), len(cards) or 2
    card, device = (cards[0], "cuda") if on_gpus else ("", "cpu")
    alone, every = (stack.enter_context(RankPool(number, device, stacks=False)) for number in (1, size))
    devices = every if on_gpus else alone  # two ranks on one CPU would share its rate
    tokens, width, numel, *sizes = expected()["sizes"][device]
    cases = {name: case for name, case in expected()["trained"].items() if case["device"] == device}

    def shares(check: str, pool: RankPool, function: Callable[..., dict[str, float]], *args: object) -> Check:
        return lambda limit_s: [judge_shares(check, pool.call(function, *args, deadline_s=limit_s))]

    def trained(name: str, limit_s: float) -> list[Finding]:
        alone.close()  # its process holds memory
        case, end_s, rates = cases[name], time.monotonic() + limit_s, dict[str, float]()
        for side in ranks.COMPARED:
            asked = _work(case), side, case["steps"]
            answers = every.call(ranks.train_rate, *asked, deadline_s=end_s - time.monotonic())
            rates[side], work = min(answers, key=lambda answer: answer[0])
        return [judge_training(name, work, rates, card)]

    measures: dict[str, Check | None] = {
        "collectives": shares("collectives", every, ranks.sums_off),
        "wire": lambda s: [judge_wire(every.call(ranks.wire_rates, numel, deadline_s=s), on_gpus=on_gpus)],
        "device": lambda s: judge_rates(devices.call(ranks.device_rates, *sizes, deadline_s=s), card),
        "host waits": shares("host waits", alone, ranks.waits) if on_gpus else None,
        "compiled blocks": shares("compiled blocks", alone, ranks.blocks_off, tokens, width),
    }
    measures |= {name: partial(trained, name) for name in cases}
    return {name: (measures.get(name), seconds) for name, seconds in expected()["seconds"].items()}


def _work(case: Case) -> Work:
    return replace(SIZES[case["size"]], device=case["device"])


def judge_shares(check: str, by_rank: Sequence[Mapping[str, float]]) -> Finding:
    """Judge errors as shares of their bounds, on every rank. `by_rank`: share by what was computed."""
    worst = {name: max(shares[name] for shares in by_rank) for name in by_rank[0]}
    wrong = [f"{name} is off by {share:.3g} bounds" for name, share in worst.items() if share > 1]
    right = f"{len(worst)} kinds, errors up to {max(worst.values()):.2f} of their bounds"
    return found(check, "; ".join(wrong) or right, bool(wrong))


def judge_wire(by_rank: Sequence[Mapping[str, float]], *, on_gpus: bool) -> Finding:
    """Judge the rate of the slowest rank in each collective."""
    if len(by_rank) == 1:
        return not_here("wire", "there is one rank")
    slowest = {name: min(rates[name] for rates in by_rank) / 1e9 for name in by_rank[0]}
    least = expected()["least"]["wire" if on_gpus else "loopback"]
    seen = ", ".join(f"{name} {rate:.2f} GB/s" for name, rate in slowest.items())
    return found("wire", seen, min(slowest.values()) < least, least=least)


def judge_rates(by_rank: Sequence[tuple[Mapping[str, float], Sequence[Card]]], card: str) -> list[Finding]:
    """Judge the slowest device by its name's promise, and its clocks under load. `by_rank`: results of device_rates."""
    memory = next((1e12 * most for pattern, most in expected()["memory"].items() if re.fullmatch(pattern, card)), 0.0)
    peak, flops = dense_peak(card, torch.bfloat16) or 0.0, ("TFLOP/s", 1e12) if card else ("GFLOP/s", 1e9)
    findings = []
    for check, promise in (("products", peak), ("copy", memory)):
        unit, scale = flops if check == "products" else ("GB/s", 1e9)
        rates, wanted = [rates[check] / scale for rates, _ in by_rank], expected()["least"][check] * promise / scale
        slowest = min(range(len(rates)), key=rates.__getitem__)
        where = f", card {slowest} of {len(rates)}" if len(rates) > 1 else ""
        told = f"{wanted:,.0f} {unit} or more" if wanted else "no figure is known here"
        findings.append(found(check, f"{rates[slowest]:,.1f} {unit}{where}", rates[slowest] < wanted, expected=told))
    return [*findings, *judge_cards(by_rank[0][1], ["power limit", "throttled"], of="under load")]


def judge_training(name: str, work: Work, rates: Mapping[str, float], card: str) -> Finding:
    """Compare ours with torch's own ways and, on a card whose peak is known, its MFU with the one expected there.

    `name`: of the case. `work`: what was trained. `rates`: tokens/s of the slowest rank, by side.
    """
    case = expected()["trained"][name]
    others = {side: rate for side, rate in rates.items() if side != "ours"}
    ours, peak = rates["ours"], dense_peak(card, torch.bfloat16)
    shares = ", ".join(f"{ours / rate:.2f} of {side}" for side, rate in others.items())
    seen = "; ".join([f"{ours:,.0f} tokens/s a rank", shares, *how_multiplied(case["device"])])
    least = expected()["least"]["train"]
    wanted, wrong = f"{least} of the best", ours < least * max(others.values())
    if work != _work(case):
        seen = f"{seen}; all that fits: {work.micro_batch_size} sequence(s), {work.model.num_layers} layers"
    if peak is not None:
        per_token = flops_per_token(work.model) / peak
        seen = f"{seen}; MFU {ours * per_token:.1%}"
        wanted = f"{wanted}, MFU {case['mfu']:.0%}: {case['mfu'] / per_token:,.0f} tokens/s"
        wrong = wrong or (work == _work(case) and ours * per_token < case["mfu"])
    return found("train", seen, wrong, of=name.removeprefix("train "), expected=wanted)
