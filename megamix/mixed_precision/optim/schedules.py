"""Learning rates, and other settings, as lists of floats, one for each update:
`AdamW(lr=schedules.cosine(3e-4, steps=1000))`.

An update is one that was applied: a step that overflowed takes no entry. The warm-up ends at update warmup_steps - 1
with the full lr and begins above 0, so no update is spent on nothing; for the same reason the decay begins at the full
lr and would reach min_lr with the update after its last one.
"""

import math
from collections.abc import Callable

Rates = list[float]  # one for each update, 0 .. steps - 1

# Factors of lr - min_lr over the progress of the decay, 0 to 1.
_DECAYS: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1.0 - progress,
    "wsd": lambda progress: 1.0 - progress,
    "constant": lambda progress: 1.0,
}


def cosine(lr: float, steps: int, warmup_steps: int = 0, decay_steps: int | None = None, min_lr: float = 0.0) -> Rates:
    """Return half a cosine from lr to min_lr over `decay_steps` behind the warm-up, and min_lr after it; None: over all
    updates behind the warm-up. Raises: ValueError naming the arguments that do not fit.
    """
    return [*map(rule("cosine", lr, steps, warmup_steps, decay_steps, min_lr), range(steps))]


def linear(lr: float, steps: int, warmup_steps: int = 0, decay_steps: int | None = None, min_lr: float = 0.0) -> Rates:
    """Return a line from lr to min_lr, otherwise as `cosine`."""
    return [*map(rule("linear", lr, steps, warmup_steps, decay_steps, min_lr), range(steps))]


def wsd(lr: float, steps: int, decay_steps: int, warmup_steps: int = 0, min_lr: float = 0.0) -> Rates:
    """Return lr (warm-up, stable, decay) until a line to min_lr over the last `decay_steps`. Raises: as `cosine`."""
    return [*map(rule("wsd", lr, steps, warmup_steps, decay_steps, min_lr), range(steps))]


def inverse_sqrt(lr: float, steps: int, warmup_steps: int = 0, min_lr: float = 0.0) -> Rates:
    """Return lr times the root of the warm-up over the number of updates, at least min_lr. Raises: as `cosine`."""
    return [*map(rule("inverse_sqrt", lr, steps, warmup_steps, None, min_lr), range(steps))]


def constant(lr: float, steps: int, warmup_steps: int = 0) -> Rates:
    """Return lr behind the warm-up. Raises: as `cosine`."""
    return [*map(rule("constant", lr, steps, warmup_steps), range(steps))]


def setting(
    number: float,
    steps: int,
    start: float | None = None,
    warmup_steps: int = 0,
    end: float | None = None,
    decay_steps: int | None = None,
    curve: str = "linear",
) -> Rates:
    """Return the numbers of a setting that begins at `start`, has its own number after `warmup_steps`, and moves to
    `end` over the last `decay_steps`; None: over all updates behind the warm-up.

    `end` would be reached with the update after the last one. `curve`: "linear", or "cosine" for half a cosine. Raises:
    ValueError naming the numbers of updates that do not fit.
    """
    after_warmup = steps - warmup_steps
    decay_length = after_warmup if decay_steps is None else decay_steps
    if not (0 <= warmup_steps <= steps and 0 <= decay_length <= after_warmup):
        raise ValueError(
            f"there is no schedule of steps {steps}, warmup_steps {warmup_steps}, decay_steps {decay_steps}: give "
            "warmup_steps and decay_steps that fit into steps"
        )
    first, last = (number if bound is None else bound for bound in (start, end))
    rising = (number + (first - number) * _DECAYS[curve](update / warmup_steps) for update in range(warmup_steps))
    kept = [number] * (after_warmup - decay_length)
    falling = (last + (number - last) * _DECAYS[curve](update / decay_length) for update in range(decay_length))
    return [*rising, *kept, *falling]


def rule(
    decay_style: str,
    lr: float,
    steps: int,
    warmup_steps: int = 0,
    decay_steps: int | None = None,
    min_lr: float = 0.0,
    done: Callable[[int], int] = int,
) -> Callable[[int], float]:
    """Return a function from the number of an update, 0 for the first, to its learning rate.

    `decay_style`: the name of a function above. `decay_steps` counts from the end of the warm-up, for wsd back from the
    end of the run; None: all updates after the warm-up. inverse_sqrt and constant ignore it. `done`: what the first n
    updates have done, in the unit of the three lengths, such as their tokens. Raises: ValueError naming the arguments
    that do not fit.
    """
    after_warmup = steps - warmup_steps
    decay_length = after_warmup if decay_steps is None else decay_steps
    fits = 0 <= warmup_steps <= steps and 0 <= decay_length <= after_warmup and decay_steps != 0
    if not fits or not 0 <= min_lr <= lr < math.inf:  # NaN neither
        raise ValueError(
            f"there is no schedule of lr {lr}, steps {steps}, warmup_steps {warmup_steps}, decay_steps {decay_steps}, "
            f"min_lr {min_lr}: give 0 <= min_lr <= lr, and warmup_steps and decay_steps that fit into steps"
        )
    decay_start = steps - decay_length if decay_style == "wsd" else warmup_steps

    def lr_at(update: int) -> float:
        start, end = done(update), done(update + 1)
        if start < warmup_steps:
            return lr * min(end, warmup_steps) / warmup_steps
        if decay_style == "inverse_sqrt":
            # 1 at the last update of the warm-up; without one, at update 0.
            return max(min_lr, lr * math.sqrt(max(warmup_steps, done(1)) / end))
        progress = min(max(start - decay_start, 0) / max(decay_length, 1), 1.0)
        return min_lr + (lr - min_lr) * _DECAYS[decay_style](progress)

    return lr_at
