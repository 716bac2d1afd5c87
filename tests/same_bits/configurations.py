"""The configurations that two trees train: a seeded cover of all pairs of settings, then seeded random ones."""

import itertools
import math
import random

from megamix.config import ConfigError, check_world_size, config_from_dict

SAMPLES, SEQ_LEN, VOCAB = 4, 8, 28  # of a step; of a sample; of the model
BASE = {
    "model": {
        "vocab_size": VOCAB, "seq_len": SEQ_LEN, "hidden_size": 16, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2,
        "init_std": 0.1,
    },
    "data": {"train": "none"},
    "optimizer": {
        "lr": 0.01,
        "groups": [{"pattern": "*norm*", "lr_factor": 2.0}, {"pattern": "*down*", "weight_decay": 0.2}],
    },
    "lr_schedule": {"warmup_steps": 2},
    "training": {"steps": 10, "global_batch_size": SAMPLES},
    "checkpoint": {"folder": "none"},
}  # fmt: skip


def _keys(section, key, *values):
    """Return an axis whose values are those of one key."""
    return {str(value): {section: {key: value}} for value in values}


def _tables(section, **values):
    return {name: {section: keys} for name, keys in values.items()}


EXPERTS = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 16}
BF16 = {"state_dtype": "bf16"}
# By axis the name of each value, and what it adds to BASE.
AXES = {
    "layout": _tables(
        "parallelism",
        dp1={"dp_size": 1},
        dp2={"dp_size": 2},
        dp4={"dp_size": 4},
        tp2={"dp_size": 1, "tensor": {"size": 2, "sequence_parallel": False}},
        dp2tp2={"dp_size": 2, "tensor": {"size": 2}},
        cp2={"dp_size": 1, "context": {"size": 2}},
        ep2={"dp_size": 2, "expert": {"size": 2}},
        pp2={"dp_size": 1, "pipeline": {"size": 2}},
        pp2zb={"dp_size": 1, "pipeline": {"size": 2, "schedule": "interleaved_zero_bubble"}},
    ),
    "model": _tables(
        "model",
        plain={},
        tied={"tie_embeddings": True},
        recompute={"recompute": "full"},
        deep={"num_layers": 9},  # small units, of which two are joined
        experts={"experts": EXPERTS},
    ),
    "dtype": _keys("precision", "dtype", "fp16", "bf16", "fp32"),
    "grads": _keys("precision", "grad_dtype", "half", "fp32"),
    "reduce": _tables("precision", own={}, half_fp32_sum={"reduce_dtype": "half_fp32_sum"}),
    "scale": _tables(
        "precision",
        off={"loss_scale": {"rule": "off"}},
        static={"loss_scale": {"rule": "static", "init_scale": 2.0**10}},
        dynamic={"loss_scale": {"rule": "dynamic", "init_scale": 2.0**16, "growth_interval": 2, "hysteresis": 2}},
        headroom={"loss_scale": {"rule": "headroom", "margin": 8.0}},
    ),
    "optimizer": _tables(
        "optimizer",
        adamw={"name": "adamw"},
        adamw_bf16={"name": "adamw", "adamw": {**BF16, "betas": [0.9, 0.99]}},  # one moment is rounded by chance
        nag={"name": "nag"},
        muon={"name": "muon"},
        muon_bf16={"name": "muon", "muon": BF16},
    ),
    "micro_batch_size": _keys("training", "micro_batch_size", 1, 2),
    "clip_grad": _keys("optimizer", "clip_grad", 0.0, 0.5),
    "compile": _keys("optimizer", "compile", False, True),
    "bucket_size": _tables("parallelism", **{"none": {}, "1": {"bucket_size": 1}, "700": {"bucket_size": 700}}),
    "overlap": _keys("parallelism", "overlap", True, False),
    "shard": _keys("parallelism", "shard", "states", "gradients", "parameters"),
    "accumulate": _keys("parallelism", "accumulate", "local", "owner"),
}


def restricted(only):
    """Return the values of each axis, those alone that `axis=value,value` names. Nothing is compiled, which takes
    seconds, unless it is asked for. Raises: ValueError naming what there is instead.
    """
    axes = {axis: [*values] for axis, values in AXES.items()} | {"compile": ["False"]}
    for text in only:
        axis, _, given = text.partition("=")
        if axis not in AXES:
            raise ValueError(f"--only: got {text!r}, must begin with one of {', '.join(AXES)}")
        axes[axis] = given.split(",")
        if unknown := set(axes[axis]) - set(AXES[axis]):
            raise ValueError(f"--only: {axis} has no value {', '.join(unknown)}; it has {', '.join(AXES[axis])}")
    return axes


def tree_of(one):
    """Return a configuration as nested plain values."""
    tree = {}
    for layer in (BASE, *(AXES[axis][value] for axis, value in one.items())):
        for section, keys in layer.items():
            tree[section] = tree.get(section, {}) | keys
    return tree


def world_size(one):
    section = tree_of(one)["parallelism"]
    tables = [section[name] for name in ("context", "tensor", "pipeline") if name in section]
    return section["dp_size"] * math.prod(table["size"] for table in tables)


def pairs_of(one):
    """Return the pairs of values of two axes that a configuration shows."""
    return {*itertools.combinations(one.items(), 2)}


def _can_be(one):
    try:
        return not check_world_size(config_from_dict(tree_of(one)), world_size(one))
    except ConfigError:
        return False


def choose(axes, count, seed):
    """Return as many configurations, of which the first show every pair that one of many random ones shows. Raises:
    ValueError if there can be none.
    """
    dice = random.Random(seed)
    drawn = [{axis: dice.choice(values) for axis, values in axes.items()} for _ in range(max(2000, 8 * count))]
    found = [one for one in drawn if _can_be(one)]
    if not found:
        raise ValueError("--only: the settings do not go together")
    missing, chosen = set().union(*map(pairs_of, found)), []
    while missing and len(chosen) < count:
        best = max(found, key=lambda one: len(pairs_of(one) & missing))
        chosen.append(best)
        missing -= pairs_of(best)
    return [*chosen, *found][:count]
