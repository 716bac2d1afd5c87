"""The end of a run: its error, and the exit status. By the status in a run's journal and the exit status a scheduler or
a person decides whether to start the run again.

The status is needed beside the exit status: plain torchrun ends with 1 if a rank fails, and a killed process chooses no
exit status. This module imports no torch.
"""

from typing import Literal

from megamix.base.signals import PREEMPTED, SAVE_FAILED, reason_words
from megamix.config import ConfigError

State = Literal["running", "finished", "preempted", "failed", "gave_up"]

# 2 is taken by wrong input, which starts no run. "running" has no exit status.
EXIT_STATUS: dict[State, int] = {"finished": 0, "failed": 1, "gave_up": 3, "preempted": PREEMPTED}
WRONG_INPUT = ConfigError.exit_status  # a run that has begun may end with 2, too; its state is then `failed`


NO_MEMORY = 4  # with exit status 4 the state is `failed`


class EndedEarlyError(Exception):
    """The end of a run before its last update, in good order and on all ranks alike. The message says why."""

    state: State = "failed"
    exit_status = EXIT_STATUS["failed"]


class PreemptedError(EndedEarlyError):
    """The end of a run that was asked to leave."""

    state: State = "preempted"
    exit_status = EXIT_STATUS["preempted"]


class SaveFailedError(EndedEarlyError):
    """The end of a run that could not write a checkpoint: its last one, or one for which on_save_failure is "stop"."""


class WrongDataError(EndedEarlyError):
    """The end of a run that found its data wrong or changed while it read them. No step has used the wrong data."""

    exit_status = WRONG_INPUT  # a new start would meet the same data


class NoMemoryError(EndedEarlyError):
    """The end of a run because a rank ran out of memory."""

    exit_status = NO_MEMORY  # the launcher recognises this status


class NoAnswerError(EndedEarlyError):
    """The end of a start because a rank died or hung before all agreed."""


class PeerLostError(EndedEarlyError):
    """The end of a rank that lost another one, which died or hung."""


class StuckError(EndedEarlyError):
    """The end of a run that was started again and again, and failed each time before it got any further."""

    state: State = "gave_up"
    exit_status = EXIT_STATUS["gave_up"]


def leaves(reason: int, applied: int, steps: int) -> EndedEarlyError:
    """Return the error with which a run leaves for this reason, after update `applied` of `steps`."""
    if reason == SAVE_FAILED:
        return SaveFailedError(f"ended after update {applied}: {reason_words(reason)}, see the log")
    return PreemptedError(f"asked to stop ({reason_words(reason)}): ended after update {applied} of {steps}")
