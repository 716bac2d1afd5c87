"""When a run that overflows again and again should stop: nothing it does from here on would be training."""

from __future__ import annotations

from collections import deque

from megamix.config import PrecisionConfig
from megamix.supervise.status import EndedEarlyError, State

WINDOW = 1000  # attempts over which max_overflows_per_window counts


class GaveUpError(EndedEarlyError):
    """The budget of overflows is spent; the message is the diagnosis."""

    state: State = "gave_up"


class OverflowBudget:
    """Counts overflows in a row, in a row at the lowest scale, and per window of attempts."""

    def __init__(self, section: PrecisionConfig):
        self._section = section
        self._in_a_row = self._at_floor = 0
        self._window: deque[bool] = deque(maxlen=WINDOW)

    def spend(self, found_inf: bool, at_floor: bool) -> str | None:
        """Count one attempt. `at_floor`: its scale could not have been lower. Returns why to stop, or None."""
        self._in_a_row = self._in_a_row + 1 if found_inf else 0
        self._at_floor = self._at_floor + 1 if found_inf and at_floor else 0
        self._window.append(found_inf)
        if self._at_floor >= self._section.max_overflows_at_floor:
            return (
                f"{self._at_floor} attempts in a row overflowed at the lowest loss scale "
                "(precision.max_overflows_at_floor)"
            )
        if self._in_a_row >= self._section.max_overflows_in_a_row:
            return f"{self._in_a_row} attempts in a row overflowed (precision.max_overflows_in_a_row)"
        in_window = sum(self._window)
        if in_window >= self._section.max_overflows_per_window:
            return (
                f"{in_window} of the last {len(self._window)} attempts overflowed (precision.max_overflows_per_window)"
            )
        return None
