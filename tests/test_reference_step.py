"""The step in plain torch, docs/examples/step.py, and the engine have the same bits on two ranks, after each of 20
updates and two overflows.
"""

import ast
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from examples import step

from megamix import AdamW, DynamicLossScale, Precision, ShardedEngine
from tests.programs import no_compiler

PROGRAM = Path(step.__file__).read_text(encoding="utf-8")


def _model():
    torch.manual_seed(0)
    return step.Net()


def _engine():
    loss_scale = DynamicLossScale(
        init_scale=step.INIT_SCALE,
        growth_factor=step.GROWTH_FACTOR,
        backoff_factor=step.BACKOFF_FACTOR,
        growth_interval=step.GROWTH_INTERVAL,
    )
    optimizer = AdamW(lr=step.LR, betas=step.BETAS, eps=step.EPS, weight_decay=step.WEIGHT_DECAY)
    with no_compiler():
        return ShardedEngine(
            _model(), optimizer, Precision(torch.float16, loss_scale=loss_scale), clip_grad=step.CLIP_GRAD
        )


def _of_engine(engine, result):
    """A step's numbers and the state after it."""
    (bucket,) = engine.buckets
    (states,) = bucket.states
    return {
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "max_abs": result.max_abs,
        "found_inf": result.found_inf,
        "scale used": result.loss_scale,
        "half_params": bucket.params,
        "master": bucket.master,
        "exp_avg": states["exp_avg"],
        "exp_avg_sq": states["exp_avg_sq"],
        "applied_updates": engine.applied_updates,
        "loss_scale": engine.loss_scale.loss_scale,
        "clean_steps": engine.loss_scale.clean_steps.long(),
    }


def _of_plain(state, result):
    """The same, by the same names. The engine rounds a step's numbers once it has used them."""
    return {
        "loss": result.loss.float(),
        "grad_norm": result.grad_norm.float(),
        "max_abs": result.max_abs.float(),
        "found_inf": result.found_inf,
        "scale used": result.loss_scale,
        "half_params": state.half_params,
        "master": state.master,
        "exp_avg": state.exp_avg,
        "exp_avg_sq": state.exp_avg_sq,
        "applied_updates": state.applied_updates,
        "loss_scale": state.loss_scale,
        "clean_steps": state.clean_steps,
    }


def _same_bits(one, other):
    return one.dtype == other.dtype and torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))


def _train_both():
    """On each rank: what differs, whether this rank's own gradients were finite in each overflow, and the updates."""
    engine, state = _engine(), step.shard(_model())
    differ, finite_overflows = [], []
    for number in range(step.STEPS):
        tokens, targets = step.batch(number, dist.get_rank())
        plain = _of_plain(state, step.train_step(state, tokens, targets))
        engine.backward(step.forward(engine, tokens, targets))
        ours = _of_engine(engine, engine.step())
        differ += [f"{name} of step {number}" for name in plain if not _same_bits(plain[name], ours[name])]
        if plain["found_inf"]:
            finite_overflows.append(bool(state.half_grads.isfinite().all()))
    return differ, finite_overflows, int(engine.applied_updates)


def test_the_engine_has_the_bits_of_the_plain_step(run_ranks):
    for differ, finite_overflows, updates in run_ranks(_train_both, 2):
        assert not differ, f"{len(differ)} differ: {differ[:5]}"
        assert finite_overflows == [True, True], "two finite halves add up to inf, on each rank"
        assert updates == 20


def test_the_plain_step_is_short_and_needs_torch_alone():
    assert len(PROGRAM.splitlines()) <= 250
    imports = [node for node in ast.walk(ast.parse(PROGRAM)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [getattr(node, "module", None) or node.names[0].name for node in imports]
    assert {name.partition(".")[0] for name in names} - sys.stdlib_module_names == {"torch"}
