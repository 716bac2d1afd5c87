"""The configurations that two trees train: a seeded cover of all pairs of settings, then seeded random ones."""

import itertools
import random

Setting = str | int | float | bool | None
Configuration = dict[str, Setting]
Pair = tuple[tuple[str, Setting], tuple[str, Setting]]  # of axes in the order of AXES

AXES = {
    "layout": ("dp1", "dp2", "dp4", "tp2", "dp2tp2", "pp2", "pp2zb"),
    "model": ("plain", "tied", "frozen", "buffers", "recompute", "deep"),
    "dtype": ("fp16", "bf16", "fp32"),
    "grads": ("half", "fp32"),
    "reduce": ("half", "half_fp32_sum"),
    "optimizer": ("adamw", "nag", "muon", "adamw_bf16", "muon_bf16"),
    "scale": ("off", "static", "dynamic", "headroom"),
    "grad_accum_steps": (1, 3),
    "clip_grad": (0.0, 0.5),
    "bucket_size": (None, 1, 700, 1_000_000),
    "overlap": (True, False),
    "units": (True, False),
    "shard": ("states", "gradients", "parameters"),
    "accumulate": ("local", "owner"),
    "fill": (False, True),
    "probe": (False, True),
    "looks": ("at the end", "at each step"),  # a look between two steps awaits what is under way
}
WORLD_SIZES = {"dp1": 1, "dp2": 2, "dp4": 4, "tp2": 2, "dp2tp2": 4, "pp2": 2, "pp2zb": 2}
# The axes of which `--product` takes every combination; the others are drawn.
PRODUCT = ("dtype", "grads", "reduce", "grad_accum_steps", "clip_grad", "bucket_size", "units", "shard")
PRODUCT += ("accumulate", "optimizer")

# Random ones that take less time come more often.
_OFTEN = (*("dp1",) * 5, *("dp2",) * 3, "dp4", "tp2", "tp2", "dp2tp2", "pp2", "pp2", "pp2zb")
_MESHES = ("tp2", "dp2tp2", "pp2", "pp2zb")
_PIPELINES = ("pp2", "pp2zb")


def _forbidden():
    """Yield the pairs that the engine, a family's model or this tool cannot have."""

    def both(axis, values, other, others):
        for value, with_it in itertools.product(values, others):
            yield (axis, value), (other, with_it)

    yield from both("layout", _MESHES, "model", ("frozen", "buffers", "recompute", "deep"))
    yield from both("layout", _MESHES, "fill", (False,))  # their models come without values
    yield from both("layout", _MESHES, "units", (False,))
    yield from both("layout", _PIPELINES, "shard", ("parameters",))
    yield from both("layout", _PIPELINES, "accumulate", ("owner",))
    yield from both("dtype", ("fp16",), "scale", ("off",))
    yield from both("dtype", ("fp32",), "reduce", ("half_fp32_sum",))
    yield from both("grads", ("fp32",), "reduce", ("half_fp32_sum",))
    yield from both("units", (False,), "shard", ("parameters",))


FORBIDDEN = frozenset(_forbidden())

_BASE = {axis: values[0] for axis, values in AXES.items()} | {"bucket_size": 700, "clip_grad": 0.5}
# Compiling takes seconds, and simulated GPUs are processes of their own: a handful each.
NAMED = tuple(
    {**_BASE, **more}
    for more in (
        {"compiled": True, "optimizer": "adamw", "scale": "dynamic"},
        {"compiled": True, "optimizer": "muon_bf16", "dtype": "bf16", "shard": "gradients", "grad_accum_steps": 3},
        {"compiled": True, "optimizer": "nag", "grads": "fp32", "scale": "static", "layout": "dp2", "overlap": False},
        {"compiled": True, "optimizer": "adamw_bf16", "reduce": "half_fp32_sum", "scale": "headroom", "layout": "dp2",
         "shard": "parameters"},
        {"compiled": True, "optimizer": "muon", "scale": "static", "layout": "dp2", "accumulate": "owner",
         "grad_accum_steps": 3},
        {"gpu": True, "scale": "dynamic"},
        {"gpu": True, "scale": "headroom", "probe": True, "layout": "dp2", "shard": "parameters", "model": "tied"},
        {"gpu": True, "dtype": "bf16", "optimizer": "muon", "layout": "dp2", "shard": "gradients", "model": "buffers",
         "grad_accum_steps": 3},
        {"gpu": True, "scale": "static", "reduce": "half_fp32_sum", "layout": "dp2", "accumulate": "owner",
         "grad_accum_steps": 3, "overlap": False},
        {"gpu": True, "dtype": "bf16", "grads": "fp32", "optimizer": "muon_bf16", "layout": "tp2", "fill": True},
    )
)  # fmt: skip


def pairs_of(configuration):
    """Return its pairs of values of two axes."""
    return set(itertools.combinations(((axis, configuration[axis]) for axis in AXES if axis in configuration), 2))


def allowed_pairs(axes):
    """Return the pairs that can be: every other axis has a value that goes with both."""
    items = [(axis, value) for axis in AXES for value in axes[axis]]

    def can_be(one, other):
        pair = dict([one, other])
        return (one, other) not in FORBIDDEN and all(
            any(_goes_with((axis, value), pair) for value in axes[axis]) for axis in AXES if axis not in pair
        )

    both = itertools.combinations(items, 2)
    return {(one, other) for one, other in both if one[0] != other[0] and can_be(one, other)}


def choose(axes, count, seed):
    """Return as many configurations, of which the first cover every allowed pair of values of two axes, if there is
    room: each has, of a few random ones, the most pairs that none before it had.
    """
    dice = random.Random(seed)
    missing = sorted(allowed_pairs(axes), key=repr)
    dice.shuffle(missing)
    chosen = []
    while len(chosen) < count:
        wanted = dict(missing[0]) if missing else {}
        if not wanted:
            wanted = {"layout": dice.choice([layout for layout in _OFTEN if layout in axes["layout"]])}
        drawn = [one for one in (_drawn(axes, wanted, dice) for _ in range(40 if missing else 1)) if one is not None]
        if not drawn and missing:  # other axes, as `--only` leaves them, have no value that goes with both
            missing.pop(0)
            continue
        if not drawn:
            continue
        uncovered = set(missing)
        best = max(drawn, key=lambda one: len(pairs_of(one) & uncovered))
        covered = pairs_of(best)
        missing = [pair for pair in missing if pair not in covered]
        chosen.append(best)
    return chosen


def product(axes, seed):
    """Return every allowed combination of the axes of PRODUCT on one rank; of the others a value each is drawn."""
    axes = {**axes, "layout": ("dp1",)}
    dice = random.Random(seed)
    found = []
    for values in itertools.product(*(axes[axis] for axis in PRODUCT)):
        wanted = dict(zip(PRODUCT, values, strict=True))
        # What has too few choices left fails again and again; a combination that is forbidden does at once.
        if pairs_of(wanted).isdisjoint(FORBIDDEN) and (one := _drawn(axes, wanted, dice, tries=50)) is not None:
            found.append(one)
    return found


def _drawn(axes, wanted, dice, tries=5):
    """Return an allowed configuration with what is wanted, the other values by chance; None if none was found."""
    for _ in range(tries):
        drawn = dict(wanted)
        for axis in dice.sample([*axes], len(axes)):
            if axis not in drawn:
                fits = [value for value in axes[axis] if _goes_with((axis, value), drawn)]
                if not fits:
                    break
                drawn[axis] = dice.choice(fits)
        else:
            return {axis: drawn[axis] for axis in AXES}
    return None


def _goes_with(item, drawn):
    return not any((item, other) in FORBIDDEN or (other, item) in FORBIDDEN for other in drawn.items())


def restricted(only):
    """Return AXES with the values that `axis=value,value` names. Raises: ValueError naming what there is instead."""
    axes = dict(AXES)
    for text in only:
        axis, _, given = text.partition("=")
        if axis not in AXES:
            raise ValueError(f"--only: got {text!r}, must begin with one of {', '.join(AXES)}")
        by_text = {str(value): value for value in AXES[axis]}
        if unknown := set(given.split(",")) - set(by_text):
            raise ValueError(f"--only: {axis} has no value {', '.join(sorted(unknown))}; it has {', '.join(by_text)}")
        axes[axis] = [by_text[value] for value in given.split(",")]
    return axes
