"""This rank among the others: they meet, act together, and leave."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megamix.base.console import say, say_phase
from megamix.base.signals import LeaveRequest, signals_noted
from megamix.checkpoint.all_or_none import AllOrNone
from megamix.comm.collectives import make_collectives
from megamix.comm.topology import NotMetError, Topology, leave_ranks, local_device, meet_ranks
from megamix.config import ConfigError, ParallelismConfig, axis_sizes, ranks_along
from megamix.launch.exit_status import (
    EndedEarlyError,
    NoAnswerError,
    NoMemoryError,
    PeerLostError,
    StuckError,
    WrongDataError,
)
from megamix.launch.run_lock import HeldError
from megamix.train.corpus import JobCorpus
from megamix.train.ranks_agree import KnownData, known_data


@dataclass
class Ranks:
    """This rank among the others, from their meeting to the end."""

    topology: Topology
    device: torch.device
    all_or_none: AllOrNone  # for collectives between two steps; the watch replaces it, so nobody keeps it
    leave: LeaveRequest
    launcher: int | None  # the launcher's pid
    data: KnownData  # what identifies the data that all ranks read
    timeout_s: float

    @property
    def is_first(self) -> bool:
        return self.topology.world.rank == 0

    def on_first(self, work: Callable[[], None]) -> None:
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


@contextmanager
def met(section: ParallelismConfig, started: Mapping[str, str], corpus: JobCorpus) -> Iterator[Ranks]:
    """Meet the other ranks, which must have been started with the same, and leave them after the block. Every rank
    must call it.

    `started`: see `started_with`.
    Raises: NoAnswerError naming the ranks that have not come; ConfigError, alike on every rank.
    """
    launcher, device = os.getppid() if dist.is_torchelastic_launched() else None, local_device()
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
    with ExitStack() as stack:
        stack.push(_leave_ranks)
        data = known_data(started, corpus, section.timeout_s)
        topology = Topology.connect(limit_s, ep_size=ranks_along(section, "ep"), **axis_sizes(section))
        # Signals are noted only from here on. Before, there is nothing to save, and a signal must be able to end a rank
        # that waits for the others.
        leave = stack.enter_context(signals_noted(launched=launcher is not None))
        all_or_none = AllOrNone(make_collectives(topology.world, device), device)
        yield Ranks(topology, device, all_or_none, leave, launcher, data, section.timeout_s)


def _leave_ranks(kind: object, error: BaseException | None, trace: object) -> None:
    of_some = isinstance(error, NoAnswerError | NoMemoryError | PeerLostError | WrongDataError)  # not of all ranks
    leave_ranks(alike=error is None or (not of_some and isinstance(error, EndedEarlyError | ConfigError)))
