"""An average of the weights, in FP32 beside the masters: an evaluation reads it in their place."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from megamix.comm.collectives import gather_json
from megamix.mixed_precision.engine import ShardedEngine
from megamix.settings.average import AverageSettings
from megamix.settings.limits import check


class WeightAverage:
    """Keeps an exponential moving average (EMA) of an engine's FP32 master weights.

        average = WeightAverage(engine, decay=0.999)  # before a checkpoint is loaded
        ...
        engine.step()  # moves the average, too: average += (1 - decay) * (masters - average)
        with average.weights():
            evaluate(engine.module)
            weights = engine.full_weights()

    It starts from the masters, and a skipped step leaves it as it is. Each owner holds its part, 4/d bytes a parameter
    where d ranks share out the masters. Frozen parameters and buffers have no average: they are the module's own.
    """

    def __init__(self, engine: ShardedEngine, decay: float | Sequence[float]):
        """Start from the masters. Every rank must call it. `decay`: the share of the average that stays at each
        update, in [0, 1), or a sequence with one for each update; later updates use the last.

        Raises: TypeError or ValueError for an argument that does not fit, for ranks that give different decays, and for
        an engine that keeps an average; RuntimeError in the middle of a step.
        """
        if not isinstance(engine, ShardedEngine):
            raise TypeError(f"engine is a {type(engine).__name__}; pass the ShardedEngine whose weights are averaged")
        check(settings := AverageSettings(decay=decay), "WeightAverage")
        engine.progress.require_empty("WeightAverage()", "right after step()")
        if engine.average_decay is not None:
            raise ValueError(f"the engine keeps an average already, with decay {engine.average_decay}; use that one")
        decays = gather_json(engine.world, settings.decay, engine.device)
        if different := [one for one in decays if one != decays[0]]:
            raise ValueError(f"decay of WeightAverage must be equal on every rank, got {[decays[0], *different]}")
        engine.begin_average(settings.decay)
        self._engine = engine

    def weights(self) -> AbstractContextManager[None]:
        """Return a context in which the module's weights are the casts of the average. Every rank must enter it and
        leave it.

        Forwards, `engine.full_weights()` and `engine.whole_parameters()` read the average there; all calls that train,
        save or load are refused. When it ends, also by an exception on all ranks, the weights are back, bit for bit.
        """
        return self._engine.averaged_weights()
