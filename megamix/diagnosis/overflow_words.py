"""An overflow in words: what was not finite, where it began, what can help. Pure functions, of one attempt or many."""

import math
from collections import Counter
from collections.abc import Sequence

from megamix.mixed_precision.culprits import Origins, ParamPeak
from megamix.mixed_precision.examination import layers_of

_MOST_NAMES = 4  # in a log, where the first says most
_MOST_LINES = 12  # in a report


def culprits(peaks: Sequence[ParamPeak]) -> list[ParamPeak]:
    """The parameters that made the step overflow, in about the order of backward, in which a fault travels on."""
    return [peak for peak in reversed(peaks) if peak.fault]


def overflow_words(loss: float, peaks: Sequence[ParamPeak]) -> str:
    """One line on one overflowed attempt: who, how, and how near the others were.

    `loss`: the attempt's mean over the global batch; `peaks`: all parameters, see `gather_peaks`.
    """
    found = culprits(peaks)
    if len(found) == len(peaks) and len({peak.fault for peak in found}) == 1:
        names = f"all {len(found)} parameters ({found[0].fault})"
    else:
        names = ", ".join(f"{peak.name} ({peak.fault})" for peak in found[:_MOST_NAMES])
        if len(found) > _MOST_NAMES:
            names += f" and {len(found) - _MOST_NAMES} more of {len(peaks)} parameters"
    words = names if math.isfinite(loss) else f"the loss is {loss}: {names}"
    rest = [peak for peak in peaks if not peak.fault]
    return f"{words}; {_nearest(rest)}" if rest else words


def _nearest(rest: Sequence[ParamPeak]) -> str:
    nearest = max(rest, key=lambda peak: peak.max_abs)
    away = f", {nearest.headroom:.1f} octaves below 65504" if nearest.headroom >= 0 else ""
    return f"the largest of the others is {nearest.name} at {nearest.max_abs:.4g}{away}"


def cause(loss: float, peaks: Sequence[ParamPeak]) -> str:
    """What kind of overflow it was, and so what can help."""
    faults = {peak.fault for peak in culprits(peaks)}
    if not math.isfinite(loss):
        return (
            f"the loss itself is {loss}: the forward pass is at fault, and no loss scale cures that; lower the "
            'learning rate, look at the batch, or write precision.dtype = "bf16"'
        )
    if "NaN" in faults:
        return (
            "the loss is finite, but a gradient is NaN: inf - inf or 0 * inf in backward; where a lower loss scale "
            "does not help, look at the operations behind the first parameter named"
        )
    if "inf" in faults:
        return (
            "the loss is finite, but a gradient went beyond its dtype's range: a lower loss scale helps until it is at "
            'its floor; then lower the learning rate, or write precision.dtype = "bf16"'
        )
    return (
        "loss and gradients are finite, but a gradient's square is beyond FP32: the run has diverged, or the loss "
        "scale is far too high for this dtype; lower the learning rate or the scale"
    )


def origin_lines(peaks: Sequence[ParamPeak], origins: Origins) -> list[str]:
    """Rank and micro-batch of each parameter that overflowed in an examined attempt, a line for each."""
    found = culprits(peaks)
    lines = [f"{peak.name}: {_where(peak, origins)}" for peak in found[:_MOST_NAMES]]
    if len(found) > _MOST_NAMES:
        lines.append(f"and {len(found) - _MOST_NAMES} more parameters")
    return lines


def _where(peak: ParamPeak, origins: Origins) -> str:
    own = [origin for origin in origins.found if origin.param == peak.name]
    if not own and origins.left_out:
        return f"{peak.fault}, among the {origins.left_out} places that are not listed"
    if not own:
        return f"{peak.fault} only in the sum over micro-batches and ranks, in no gradient by itself"
    places: dict[tuple[str, int], list[str]] = {}
    for origin in own:
        places.setdefault((origin.fault, origin.rank), []).append(str(origin.micro_batch))
    return "; ".join(
        f"{fault} on rank {rank}, micro-batch{'es' * (len(numbers) > 1)} {', '.join(numbers)}"
        for (fault, rank), numbers in places.items()
    )


def culprit_table(history: Sequence[Sequence[ParamPeak]]) -> list[str]:
    """Which parameters and layers overflowed how often, for the report of a run that gives up; the most frequent first.

    `history`: the peaks of each overflowed attempt, oldest first.
    """
    params: Counter[tuple[str, str]] = Counter()
    layers: Counter[str] = Counter()
    for peaks in history:
        found = culprits(peaks)
        params.update((peak.name, str(peak.fault)) for peak in found)
        layers.update(layers_of([peak.name for peak in found]))
    if not params:
        return []
    lines = [
        f"{name}: {fault} in {count} of {len(history)}" for (name, fault), count in params.most_common(_MOST_LINES)
    ]
    if len(params) > _MOST_LINES:
        lines.append(f"and {len(params) - _MOST_LINES} more")
    words = ", ".join(f"{layer} ({count})" for layer, count in layers.most_common())
    return [*lines, f"layers: {words}"]
