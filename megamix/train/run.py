"""A start of a run in its folder: it holds the folder, counts the start, watches the ranks, and says how it ended."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from platform import python_version
from typing import Any

import torch
from torch import Tensor

from megamix.base.console import Console, say
from megamix.base.machine import cpu_name, num_cores
from megamix.checkpoint.all_or_none import AllOrNone
from megamix.comm.topology import side_store
from megamix.config import ConfigError
from megamix.config.sections import CheckpointConfig
from megamix.launch import run_folder
from megamix.launch.exit_status import EndedEarlyError, NoMemoryError
from megamix.launch.journal import Journal, Reached
from megamix.launch.ledger import BEGAN, COMPILE, START, Ledger, age_s, boot_s
from megamix.launch.liveness import Position, RollCall
from megamix.launch.run_folder import checkpoint_words
from megamix.launch.run_lock import run_lock
from megamix.launch.run_status import refuse_if_stuck
from megamix.launch.watchdog import Watchdog, early_end
from megamix.log.alerts import send
from megamix.log.live_tensors import tell_live_tensors
from megamix.mixed_precision.engine import ShardedEngine
from megamix.mixed_precision.flat_layout import ParamSpec
from megamix.mixed_precision.weights import Fill
from megamix.train.own_code import source
from megamix.train.ranks import Ranks
from megamix.train.run_record import Progress, cut_logs

# Seconds for which a rank that has written its share waits for the slowest rank, as long as that one makes progress. If
# it makes none, the watchdog ends the run earlier.
SAVE_TIMEOUT_S = 6 * 3600.0


class Run:
    """One start of a run on this rank."""

    def __init__(self, ranks: Ranks, section: CheckpointConfig, steps: int, alert: Sequence[str], parameters: int):
        """`alert`: the user's program that is told how the run ends; empty: none. `parameters`: those of the model."""
        self.ranks, self.folder, self._steps = ranks, Path(section.folder), steps
        self._max_restarts, self._alert, self.parameters = section.max_restarts, alert, parameters
        self.kept = checkpoint_words(section, steps)  # a line of the log
        card = f"{torch.cuda.get_device_name(ranks.device)}, " if ranks.device.type == "cuda" else ""
        self.facts: dict[str, int | str] = {  # what trains where, for the journal and TensorBoard
            "parameters": parameters,
            "ranks": ranks.topology.world.size,
            "machine": f"{card}{num_cores()} cores of {cpu_name()}",
            "versions": f"megamix {source()}, torch {torch.__version__}, Python {python_version()}",
        }
        self._start = Progress()
        self._drawn_bytes = 0  # of initial weights so far
        self._engine: ShardedEngine | None = None
        self._position: Callable[[], Position] = self._position_at_the_start
        self._reached: Callable[[], Reached] = lambda: Reached(self._start.applied, self._start.tokens)
        began_s = float(os.environ.get(BEGAN) or boot_s() - age_s(ranks.launcher or os.getpid()))
        self.journal = Journal(self.folder, Ledger(began_s), lambda: self._reached(), self._tell_ended)

    @cached_property  # built at the first line, since a progress bar counts time from its construction
    def console(self) -> Console:
        return Console(self._steps, speaks=self.ranks.is_first)

    @contextmanager
    def held(self, problems: Callable[[], list[str]]) -> Iterator[None]:
        """Hold the run's folder during the block. `problems`: returns why it is another run's.

        Raises: as `run_lock`; also ConfigError with the problems.
        """

        def hold() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(run_lock(self.folder, say=say))
            if found := problems():  # another job may have written there after all ranks had looked
                raise ConfigError(found, "job")

        self.ranks.all_or_none.every(lambda: None)  # no rank takes the folder while a slower one still checks it
        with ExitStack() as stack:
            self.ranks.on_first(hold)
            yield

    @contextmanager
    def begun(self, start: Progress) -> Iterator[None]:
        """Count this start, and watch the other ranks during the block. Then write how the run ended."""
        # It is counted before the model is built and loaded: a run that dies meanwhile has started as well.
        self._start = start
        self.ranks.on_first(self._open)
        with self.journal.beating() if self.ranks.is_first else nullcontext(), self._watched():
            yield

    def counted(self, fill: Fill) -> Fill:
        """Return a `fill` that also counts the drawn bytes as progress, by which others see that this rank lives."""

        def fill_and_count(spec: ParamSpec, start: int, values: Tensor) -> None:
            fill(spec, start, values)
            self._drawn_bytes += values.nbytes

        return fill_and_count

    def built(self, engine: ShardedEngine) -> None:
        """Take the engine, whose loading is progress, too."""
        self._engine = engine
        self.journal.ledger.enter(START)
        self.journal.ledger.move(engine.compile_s, of=START, to=COMPILE)

    def claim(self, start: Progress, text: str, *, memory: bool) -> None:
        """Make the folder this run's, which goes on from `start`. `text`: the configuration. `memory`: whether the
        state came from the nodes' memory.
        """

        def take() -> None:
            run_folder.claim(self.folder, text)
            cut_logs(self.folder, start)
            (self.folder / run_folder.GAVE_UP).unlink(missing_ok=True)
            self.journal.tell("loaded", memory=memory)
            refuse_if_stuck(self.journal, self._max_restarts)

        self._start = start
        self.ranks.on_first(take)

    def follow(self, position: Callable[[], Position], reached: Callable[[], Reached]) -> None:
        """From now on ask the training where the main thread is, and where the run is. Any thread may ask."""
        self._position, self._reached = position, reached

    def _open(self) -> None:
        self.journal.open(steps=self._steps, **self.facts)
        launched_s = boot_s() - age_s(os.getpid()) - self.journal.ledger.began_s
        self.journal.tell("launched", at=round(launched_s, 3))
        self.journal.tell("joined")
        for path in self.folder.glob("collectives_rank*.json"):  # of an earlier start
            path.unlink()
        refuse_if_stuck(self.journal, self._max_restarts)

    def _position_at_the_start(self) -> Position:
        loaded = 0 if self._engine is None else self._engine.clock.loaded
        return Position(0, "the start", 0, self._drawn_bytes + loaded)

    def _tell_ended(self, **values: Any) -> None:
        if self._alert:
            send(self._alert, self.folder, "end", update=self._reached().step, **values)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        ranks, journal, roll = self.ranks, self.journal, None
        world = ranks.topology.world
        try:
            if world.group is not None:
                roll = RollCall(side_store(world), world.rank, world.size)
            with Watchdog(roll, ranks.timeout_s, journal, ranks.leave, ranks.launcher, lambda: self._position()):
                ranks.all_or_none = AllOrNone.apart(world, SAVE_TIMEOUT_S)  # watched: this may wait just as long
                # All ranks wait until the first rank has written everything: torchrun ends all ranks some time after
                # one has left early, and the watchdog takes a rank that has left for dead.
                try:
                    yield
                except EndedEarlyError as early:
                    ranks.all_or_none.first(partial(journal.end, early))
                    raise
                except Exception as error:
                    if isinstance(early_end(error), NoMemoryError):
                        tell_live_tensors(self.folder, world.rank, self._engine, error)
                    raise
                ranks.all_or_none.first(partial(journal.end, None))
        except BaseException as error:
            wrong = early_end(error)
            if world.rank == 0 and (wrong or not isinstance(error, EndedEarlyError)):
                journal.end(wrong or error)
            if wrong:  # an error of this rank only; the watchdog has told the other ranks
                raise wrong from error
            raise
