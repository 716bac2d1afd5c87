"""Search for the first loss scale, reported in one line: it overflows by design, so its overflows are no warnings."""

import math

from megamix.base.console import format_scale


class ScaleSearch:
    """Overflows before the first update, while a lower loss scale can cure them."""

    def __init__(self, min_scale: float):
        """Start before the run's first attempt.

        `min_scale`: the lowest scale of the rule; that of a static rule is its only one, and nothing is searched.
        """
        self._min_scale = min_scale
        self._first_scale = math.nan
        self._tries = 0

    def takes(self, applied: int, loss: float, loss_scale: float) -> bool:
        """Return whether an overflow is one of the search, and count it. The caller tells any other one at once."""
        if applied or not math.isfinite(loss) or loss_scale <= self._min_scale:
            return False
        if not self._tries:
            self._first_scale = loss_scale
        self._tries += 1
        return True

    def end(self, loss_scale: float) -> str:
        """End the search with the scale of an applied update. Return it as a line; "" where there was none."""
        tries, self._tries = self._tries, 0
        if not tries:
            return ""
        tried = f"{tries} {'try' if tries == 1 else 'tries'}"
        return f"loss scale: {format_scale(self._first_scale)} -> {format_scale(loss_scale)} in {tried}, nothing lost"
