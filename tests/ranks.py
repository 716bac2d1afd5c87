"""Real Gloo ranks for tests: a pool per world size (megamix/verify/rank_pool.py), started when first asked for.

A case that fails in a rank fails the test by the rank's name, and its pool is started anew for the next case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megamix.verify.rank_pool import CONTEXT, DEADLINE_S, RankFailure, RankPool

__all__ = ["CONTEXT", "DEADLINE_S", "RankFailure", "RankPool", "RankPools"]


class RankPools:
    """One pool per world size, started when first asked for."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def run(self, case: Callable[..., Any], world_size: int, *args: Any, deadline_s: float = DEADLINE_S) -> list[Any]:
        if world_size not in self._pools:
            self._pools[world_size] = RankPool(world_size)
        try:
            return self._pools[world_size].run(case, args, deadline_s)
        except RankFailure:
            self._pools.pop(world_size).close(kill=True)  # the survivors may still wait inside a collective
            raise

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
