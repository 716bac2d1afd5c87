"""Settings of the average of the weights."""

from dataclasses import dataclass

from megamix.settings.limits import ShareByUpdate


@dataclass(frozen=True, kw_only=True)
class AverageSettings:
    """Declares the settings of an exponential moving average of the weights."""

    decay: ShareByUpdate
    """Share of the average that stays at each update, in [0, 1)."""
