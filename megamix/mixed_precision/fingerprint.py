"""Every rank must have been given the same: one hash stands for a model's layout and its settings."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from megamix.comm.collectives import Collectives


def fingerprint(*values: object) -> str:
    """SHA-256 of what the values print."""
    return hashlib.sha256(repr(values).encode()).hexdigest()


def require_equal(collectives: Collectives, device: torch.device, *values: object) -> None:
    """Raises: ValueError on every rank if one has another fingerprint. Every rank must call it."""
    mine = torch.tensor([int(fingerprint(*values)[:15], 16)], device=device)
    axis = collectives.axis
    different = [axis.ranks[place] for place in (collectives.table(mine) != mine).nonzero()[:, 0].tolist()]
    if different:
        raise ValueError(
            f"rank {axis.ranks[axis.rank]} and ranks {different} hold different models or settings: parameter "
            "names, shapes, dtypes, optimizer, loss_scale, clip_grad, grad_accum_steps, compile_update and the order "
            "of the parameters in units must be equal on every rank"
        )


def require_own_state(state: Mapping[str, Any], own: str, rank: int) -> None:
    """Raises: ValueError if the state is a module's, another rank's, or of a layout with another fingerprint."""
    if not {"layout", "rank"} <= set(state):
        raise ValueError(
            "load_state_dict() of the engine takes what engine.state_dict() returned; to set the module's weights from "
            "model.state_dict() call engine.load_weights(state_dict)"
        )
    if (state["layout"], state["rank"]) != (own, rank):
        raise ValueError(
            f"this state is rank {state['rank']}'s of layout {state['layout'][:12]}, here is rank {rank} of "
            f"{own[:12]}; build the engine as it was: model, ranks, bucket_size, dtype, optimizer and its groups, kind "
            "of loss scale"
        )
