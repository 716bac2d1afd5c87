"""Keys that had another name or place: what was saved is read by the new one, a user is told it."""

import copy
from collections.abc import Mapping
from typing import Any

from megamix.config.choices import Tree

_OF_LOSS_SCALE = (
    "init_scale", "growth_factor", "backoff_factor", "growth_interval", "hysteresis", "consecutive_hysteresis",
    "margin", "min_scale", "max_scale",
)  # fmt: skip
MOVED = {
    "checkpoint.verify_interval": "checkpoint.replica_check_interval",
    **{f"optimizer.{key}": f"optimizer.adamw.{key}" for key in ("betas", "eps")},
    **{f"optimizer.{key}": f"optimizer.nag.{key}" for key in ("momentum", "momentum_form", "decoupled_weight_decay")},
    "precision.loss_scale": "precision.loss_scale.rule",  # before init_scale, which a number says
    **{f"precision.{key}": f"precision.loss_scale.{key}" for key in _OF_LOSS_SCALE},
}


def migrate_keys(tree: Mapping[str, Any]) -> tuple[Tree, list[tuple[str, object, Tree]]]:
    """Return a configuration with the names that its keys have now, and of those that had others the old name, the
    value and what says the same now.
    """
    renamed, moved = copy.deepcopy(dict(tree)), []
    for key, new in MOVED.items():
        section, name = key.split(".")
        table = renamed.get(section)
        if not isinstance(table, dict) or name not in table or isinstance(table[name], dict):
            continue  # precision.loss_scale is a table now
        value = table.pop(name)
        now: Tree = {new: value}
        if key == "precision.loss_scale" and isinstance(value, int | float) and not isinstance(value, bool):
            now = {new: "static", "precision.loss_scale.init_scale": value}
        for place, said in now.items():
            *inner, last = place.split(".")[1:]
            home = table.setdefault(inner[0], {}) if inner else table
            if isinstance(home, dict):  # else it is no table, and a mistake that is told elsewhere
                home.setdefault(last, said)
        moved.append((key, value, now))
    return renamed, moved
