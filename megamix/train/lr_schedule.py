"""The learning rate as a pure function of the number of updates applied before: skipped steps do not count.

Update u (from 0) runs at `lr_at(u)`. The warm-up ends at update warmup_steps - 1 with the full lr and begins above
0, so no update is spent on nothing; for the same reason the decay begins at the full lr and would reach min_lr with
the update after its last one.
"""

import math
from collections.abc import Callable
from typing import Literal

DecayStyle = Literal["cosine", "linear", "wsd", "inverse_sqrt", "constant"]


def lr_table(
    *,
    optimizer_lr: float,
    min_lr: float,
    decay_style: DecayStyle,
    warmup_steps: int,
    decay_steps: int | None,
    steps: int,
) -> list[float]:
    """The learning rate of updates 0 .. steps - 1, FP64. The keys are those of the configuration.

    `decay_steps` counts from the end of the warm-up, for wsd back from the end of the run; None: all that is left
    after the warm-up. inverse_sqrt and constant have no end and do not use it.
    """
    after_warmup = steps - warmup_steps
    assert 0 <= min_lr <= optimizer_lr, (min_lr, optimizer_lr)
    assert decay_steps is None or 0 < decay_steps <= after_warmup, (decay_steps, warmup_steps, steps)
    decay_length = after_warmup if decay_steps is None else decay_steps
    decay_start = steps - decay_length if decay_style == "wsd" else warmup_steps

    def lr_at(update: int) -> float:
        if update < warmup_steps:
            return optimizer_lr * (update + 1) / warmup_steps
        if decay_style == "inverse_sqrt":
            return max(min_lr, optimizer_lr * inverse_sqrt(update, warmup_steps))
        progress = min(max(update - decay_start, 0) / decay_length, 1.0)
        return min_lr + (optimizer_lr - min_lr) * _DECAYS[decay_style](progress)

    return [lr_at(update) for update in range(steps)]


def linear(progress: float) -> float:
    return 1.0 - progress


def cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def constant(progress: float) -> float:
    return 1.0


def inverse_sqrt(update: int, warmup_steps: int) -> float:
    """sqrt(w / (u + 1)): 1 at the last update of the warm-up; without one, 1 at update 0."""
    return math.sqrt(max(warmup_steps, 1) / (update + 1))


# Decay styles as factors of lr - min_lr over the progress of the decay, 0 to 1.
_DECAYS: dict[str, Callable[[float], float]] = {
    "cosine": cosine,
    "linear": linear,
    "wsd": linear,
    "constant": constant,
}
