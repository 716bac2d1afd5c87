"""A rank of a job among the others: they meet, hold the run's folder, watch that all of them live, and leave
together.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from platform import python_version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamix.checkpoint.all_or_none import AllOrNone
from megamix.comm.collectives import make_collectives
from megamix.comm.topology import NotMetError, Topology, leave_ranks, local_device, meet_ranks, side_store
from megamix.config import Config, ConfigError, axis_sizes
from megamix.inspect.live_tensors import tell_live_tensors
from megamix.machine import cpu_name, num_cores
from megamix.mixed_precision.engine import ShardedEngine
from megamix.mixed_precision.flat_layout import ParamSpec
from megamix.mixed_precision.weights import Fill
from megamix.model.family import parameter_count
from megamix.report.alerts import send
from megamix.report.journal import Journal, Reached
from megamix.report.ledger import Ledger, age_s, boot_s
from megamix.report.metrics import cut_logs
from megamix.run import run_folder
from megamix.run.own_code import source
from megamix.run.ranks_agree import known_data
from megamix.run.resume import Start, find_start
from megamix.supervise.console import Console, say, say_phase
from megamix.supervise.liveness import Position, RollCall
from megamix.supervise.run_lock import HeldError, run_lock
from megamix.supervise.status import (
    EndedEarlyError,
    LeaveRequest,
    NoAnswerError,
    NoMemoryError,
    PeerLostError,
    RunStatus,
    StuckError,
    WrongDataError,
    signals_noted,
)
from megamix.supervise.watchdog import Watchdog, early_end
from megamix.train.trainer import Trainer

# Seconds for which a rank that has written its share waits for the slowest rank, as long as that one makes progress. If
# it makes none, the watchdog ends the run earlier.
SAVE_TIMEOUT_S = 6 * 3600.0


@dataclass
class Job:
    """Holds the objects that all parts of a run share on this rank, from the meeting of the ranks to the run's end."""

    config: Config
    device: torch.device
    topology: Topology
    all_or_none: AllOrNone  # for collectives between two steps
    leave: LeaveRequest
    launcher: int | None  # the launcher's pid
    data_identity: str  # identity of the files whose fingerprints were compared
    facts: dict[str, int | str]  # what trains where, for the journal and TensorBoard
    start: Start = field(init=False)  # the start of this run: with or without a checkpoint
    drawn_bytes: int = 0  # bytes of initial weights so far
    engine: ShardedEngine | None = None
    trainer: Trainer | None = None

    def __post_init__(self) -> None:
        folder, steps = Path(self.config.checkpoint.folder), self.config.training.steps
        self.journal = Journal(folder, Ledger(boot_s() - age_s(self.launcher or os.getpid())), self._reached)
        self.status = RunStatus(folder, steps, lambda: self._reached().step, self._ended)

    @cached_property  # built at the first line, since a progress bar counts time from its construction
    def console(self) -> Console:
        return Console(self.config.training.steps, speaks=self.topology.world.rank == 0)

    def on_first_rank(self, work: Callable[[], None]) -> None:
        """Run `work`, which changes the run's folder, on the first rank. If it is refused there, every rank ends.

        Raises: ConfigError, also for an OSError, or StuckError. Every rank raises the same kind, so that all end with
        one exit status.
        """
        refusal: ConfigError | StuckError | None = None

        def refused() -> str | None:
            nonlocal refusal
            try:
                work()
            except OSError as error:
                refusal = ConfigError([f"checkpoint.folder: {error}; write another folder"], "job")
            except (ConfigError, StuckError) as error:
                refusal = error
            return None if refusal is None else type(refusal).__name__

        kind = self.all_or_none.first(refused)
        if kind is not None:
            elsewhere = "the first rank says why"
            kinds = {"StuckError": StuckError(elsewhere), "HeldError": HeldError([elsewhere], "job")}
            raise refusal or kinds.get(kind, ConfigError([elsewhere], "job"))

    def take_folder(self, stack: ExitStack) -> None:
        """Hold the run's folder until the end of `stack`. Raises: as `run_lock`; also ConfigError for the folder of
        another run.
        """
        self.status.folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(run_lock(self.status.folder, say=say))
        # Another job may have written there after all ranks had looked.
        if problems := run_folder.folder_problems(self.config):
            raise ConfigError(problems, "job")

    def begin(self, start: Start, *, claims: bool) -> None:
        """Count this start in the folder's status and journal. A second call replaces the count of the first one. With
        `claims` the folder also becomes this run's.
        """
        if claims:
            run_folder.claim(self.config)
            cut_logs(self.status.folder, start.progress)
            (self.status.folder / run_folder.GAVE_UP).unlink(missing_ok=True)
        if not self.journal.starts:
            self.journal.open(steps=self.config.training.steps, **self.facts)
            self.journal.tell("joined")
        self.status.begin(start.progress.applied, self.config.checkpoint.max_restarts, self.journal.starts)

    def counted(self, fill: Fill) -> Fill:
        """Return a `fill` that also counts the drawn bytes as progress, by which others see that this rank lives."""

        def fill_and_count(spec: ParamSpec, start: int, values: Tensor) -> None:
            fill(spec, start, values)
            self.drawn_bytes += values.nbytes

        return fill_and_count

    def position(self) -> Position:
        """Return the main thread's position, for any thread. A save beside training is not counted as its progress."""
        if self.trainer is None:
            loaded = 0 if self.engine is None else self.engine.clock.loaded
            return Position(0, "the start", 0, self.drawn_bytes + loaded)
        clock, plan = self.trainer.engine.clock, self.trainer.batch_plan
        doing = clock.doing()
        written = self.trainer.checkpoints.written if doing == "save" else 0
        return Position(clock.entered, doing, max(plan.launched - 1, 0), written)

    def _ended(self, **values: Any) -> None:
        """Tell the journal, and the user's program if there is one, how the run ended."""
        self.journal.tell("end", **values)
        if (alert := getattr(self.config.metrics, "alert", None)) is not None:
            send(alert.command, self.status.folder, "end", update=self._reached().step, **values)

    def _reached(self) -> Reached:
        """Return the place of the loop, or before it that of the checkpoint that it goes on from."""
        if self.trainer is None:
            return Reached(self.start.progress.applied, self.start.progress.tokens)
        return Reached(self.trainer.batch_plan.applied, self.trainer.report.tokens)


def join(config: Config, stack: ExitStack) -> Job:
    """Meet the other ranks, find where the run goes on, and hold its folder until the end of `stack`.

    Every rank must call it.
    Raises: NoAnswerError naming the ranks that have not come; ConfigError, alike on every rank.
    """
    launcher = os.getppid() if dist.is_torchelastic_launched() else None
    device, section = local_device(), config.parallelism
    # The limit is a second longer than the watchdog's, so that the watchdog names a missing peer before a collective
    # gives up.
    limit_s = section.timeout_s + 1.0
    if (size := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        say_phase(f"meeting all {size} ranks")
    try:
        meet_ranks(device, limit_s)
    except NotMetError as error:
        rank = int(os.environ["RANK"])
        if 0 in error.late and {*range(rank)} <= {*error.late}:  # otherwise the first rank reports it
            say(f"megamix train: {error}", sys.stderr)
        raise NoAnswerError(str(error)) from None
    stack.push(_leave_ranks)
    data = known_data(config)
    topology = Topology.connect(limit_s, ep_size=section.ep_size, **axis_sizes(section))
    # Signals are noted only from here on. Before, there is nothing to save, and a signal must be able to end a rank
    # that waits for the others.
    leave = stack.enter_context(signals_noted(launched=launcher is not None))
    all_or_none = AllOrNone(make_collectives(topology.world, device), device)
    facts = _facts(config, device, topology)
    job = Job(config, device, topology, all_or_none, leave, launcher, data.identity, facts)
    all_or_none.every(lambda: None)  # no rank takes the folder while a slower one still checks it
    job.on_first_rank(lambda: job.take_folder(stack))
    job.start = find_start(config, data.fingerprints, all_or_none)
    # The start is counted before the model is built and loaded: a run that dies meanwhile has started as well.
    job.on_first_rank(lambda: job.begin(job.start, claims=False))
    if topology.world.rank == 0:
        stack.enter_context(job.journal.beating())
    return job


def _facts(config: Config, device: torch.device, topology: Topology) -> dict[str, int | str]:
    """Return what trains where. Raises: ValueError, alike on every rank, for a model that cannot be built."""
    card = f"{torch.cuda.get_device_name(device)}, " if device.type == "cuda" else ""
    return {
        "parameters": parameter_count(config.model),
        "ranks": topology.world.size,
        "machine": f"{card}{num_cores()} cores of {cpu_name()}",
        "versions": f"megamix {source()}, torch {torch.__version__}, Python {python_version()}",
    }


def _leave_ranks(kind: object, error: BaseException | None, trace: object) -> None:
    of_some = isinstance(error, NoAnswerError | NoMemoryError | PeerLostError | WrongDataError)  # not of all ranks
    leave_ranks(alike=error is None or (not of_some and isinstance(error, EndedEarlyError | ConfigError)))


@contextmanager
def supervised(job: Job) -> Iterator[None]:
    """Watch the other ranks while the block runs. Then write into the folder's status how the run ended."""
    world, roll = job.topology.world, None
    try:
        if world.group is not None:
            roll = RollCall(side_store(world), world.rank, world.size)
        with Watchdog(roll, job.config.parallelism.timeout_s, job.status, job.leave, job.launcher, job.position):
            job.all_or_none = AllOrNone.apart(world, SAVE_TIMEOUT_S)  # watched, because this may wait just as long
            # All ranks wait until the first rank has written everything: torchrun ends all ranks some time after one
            # has left early, and the watchdog takes a rank that has left for dead.
            try:
                yield
            except EndedEarlyError as early:
                job.all_or_none.first(partial(job.status.end, early))
                raise
            except Exception as error:
                if isinstance(early_end(error), NoMemoryError):
                    tell_live_tensors(job.status.folder, world.rank, job.engine, error)
                raise
            job.all_or_none.first(partial(job.status.end, None))
    except BaseException as error:
        wrong = early_end(error)
        if world.rank == 0 and (wrong or not isinstance(error, EndedEarlyError)):
            job.status.end(wrong or error)
        if wrong:  # an error of this rank only; the watchdog has told the other ranks
            raise wrong from error
        raise
