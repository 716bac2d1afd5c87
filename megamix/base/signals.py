"""Signals: what each process does at each of them. Every handler is installed here, but that of SIGUSR2.

process                 SIGINT (Ctrl-C)  SIGTERM    SIGUSR1   SIGHUP   SIGQUIT   by
pretrain.sh, at first   dies             ends with 75         dies     dies      ctrl_c_kills, sigterm_and_sigusr1_end
launcher without ranks  ends with 75, and says that no rank had started          signals_passed_on
launcher with ranks     tells each rank, and kills it after a time; not after    signals_passed_on
                        SIGUSR1
launcher after them     nothing: it is about to end as they have                 signals_passed_on
warm process            nothing: the launcher tells its ranks                    leave_signals_to_launcher
rank before it joins    dies: nothing has begun, and the launcher ends with 75   ctrl_c_kills
rank from then on       notes it: all ranks end after one update, save, and      signals_noted
                        end with 75 (`Trainer.train`); a third SIGINT aborts
another verb            unwinds, 130;    dies       dies      dies     dies      CtrlC
                        a second kills
  verify, audit         likewise         unwinds,   dies      dies     dies      sigterm_unwinds, sigterm_noted
                                         143
  doctor --first-light  writes its page, 130        dies      dies     dies      end_noted
worker of a verb        nothing: its     dies       dies      dies     dies      starts_deaf, stay_deaf
                        verb ends it

"dies": the system ends it, without a word. SIGHUP stays ignored where nohup has set it so. SIGUSR2 is left to torchrun,
and ranks of `megamix/tools/ranks.py` write their stacks at it.

This module is imported before all others, so it imports nothing that takes time.
"""

import contextlib
import math
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Self

INTERRUPTED = 128 + signal.SIGINT  # exit status by which a shell knows an interrupted command
PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h, "try again later": exit status of a run that was asked to leave


@contextmanager
def _handled(numbers: Iterable[int], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Call `handler` at these signals until the end of the block. Only the main thread may call it."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


# A process before its modules are loaded.


def ctrl_c_kills() -> None:
    """Let Ctrl-C end this process without a traceback: nothing has begun. A choice of nohup's stays."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def sigterm_and_sigusr1_end() -> None:
    """Let a scheduler's signals end this process with PREEMPTED: they may come before its modules are loaded."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: os._exit(PREEMPTED))


# A rank.

# SIGHUP: the terminal was closed, or the connection to it was lost. SIGQUIT: Ctrl-\\; it dumps no core here.
_PRESSING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # the launcher kills some time after these
NOTED = (*_PRESSING, signal.SIGUSR1)
PARENT_DIED, SAVE_FAILED = 256, 257  # reasons beside the signals' numbers
SHUTDOWN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # torchrun's own variable, which our launcher sets


class LeaveRequest:
    """Holds whether this rank was asked to leave, and why: `reason` is 0, a signal's number, PARENT_DIED or
    SAVE_FAILED. The first reason stays.

    `shutdown_s`: seconds after any signal but SIGUSR1 until the launcher kills its ranks; inf: never.
    """

    def __init__(self, shutdown_s: float = math.inf, now_s: Callable[[], float] = time.monotonic) -> None:
        self.reason = 0
        self.begun = False  # True: a launcher has started ranks that are not its children
        self._shutdown_s, self._now_s = shutdown_s, now_s
        self._end_s = math.inf

    def ask(self, reason: int) -> None:
        self.reason = self.reason or reason
        if reason in _PRESSING:  # even after a SIGUSR1, which sets no limit itself
            self._end_s = min(self._end_s, self._now_s() + self._shutdown_s)

    def left_s(self) -> float:
        """Return the seconds until the launcher kills this rank."""
        return self._end_s - self._now_s()


def reason_words(reason: int) -> str:
    ours = {PARENT_DIED: "a launcher died", SAVE_FAILED: "a checkpoint could not be saved"}
    return ours.get(reason) or signal.Signals(reason).name


def _to_note() -> list[signal.Signals]:
    """Return the signals to note in this process. SIGHUP is left out if it is ignored, as under nohup: such a run
    outlives its terminal.
    """
    return [number for number in NOTED if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


@contextmanager
def signals_noted(*, launched: bool = False) -> Iterator[LeaveRequest]:
    """Note signals until the end of the block. The handler only notes the request, and training ends at its next
    update. The handler must not do more, because it may run in the middle of anything, even of a save. A third SIGINT
    raises KeyboardInterrupt.

    `launched`: whether a launcher ends this process some time after a signal.
    """
    # torchrun waits 30 s unless the environment says otherwise.
    request = LeaveRequest(float(os.environ.get(SHUTDOWN_VARIABLE, "30")) if launched else math.inf)
    interrupts = 0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        request.ask(number)
        interrupts += number == signal.SIGINT
        if interrupts == 3:  # a person at the terminal has lost patience
            raise KeyboardInterrupt

    with _handled(_to_note(), note):
        yield request


# A launcher.

# Seconds from a signal until the ranks are killed. torchrun's default, 30 s, may be less than a save takes. A long
# limit does no harm: a scheduler kills this process by a limit of its own, and the ranks end a hang by themselves.
SHUTDOWN_S = 3600
_NO_RANK = "megamix: interrupted before any rank had started; the same command starts again"


@contextmanager
def signals_passed_on(children_of: Callable[[int], list[int]]) -> Iterator[LeaveRequest]:
    """Send each signal on to the ranks, at once, until the end of the block. Without ranks a signal ends this process
    with PREEMPTED. After the block signals stay ignored: the ranks have ended, and nothing may replace their status,
    not even while Python ends.

    A thread that the system wakes sends the signals. The main thread may wait within torch for minutes, for instance
    for another node, and Python runs no handler then. `children_of`: returns the pids of a process's children, which
    are the ranks here.
    """
    # The ranks read the limit from the environment: they must not begin a save that takes longer.
    request = LeaveRequest(float(os.environ.setdefault(SHUTDOWN_VARIABLE, str(SHUTDOWN_S))))
    wake, woken = os.pipe()[::-1]
    os.set_blocking(wake, False)
    before_fd = signal.set_wakeup_fd(wake)
    numbers = _to_note()
    for number in numbers:
        signal.signal(number, lambda number, frame: None)
    thread = threading.Thread(target=_pass_on, args=(woken, request, children_of, _faults_of_the_ended()), daemon=True)
    thread.start()
    try:
        yield request
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(before_fd)
        os.close(wake)  # ends the thread
        thread.join()
        os.close(woken)


def _pass_on(woken: int, request: LeaveRequest, children_of: Callable[[int], list[int]], faults: int) -> None:
    """Send each signal that the pipe `woken` announces to the ranks. Kill the ranks at the end of the request's grace
    period.

    If no rank has started, the launcher ends here. If the ranks have ended already, this function continues, because
    the main thread is about to return their exit status. `faults`: `_faults_of_the_ended()` before the ranks started.
    """
    while True:
        left_s = request.left_s()
        readable, _, _ = select.select([woken], [], [], None if math.isinf(left_s) else max(0.1, left_s))
        if not readable:
            send(signal.SIGKILL, children_of(os.getpid()))
            continue
        told = os.read(woken, 64)
        if not told:
            return
        for number in told:
            if number in NOTED:  # other signals are left to torchrun and Python
                request.ask(number)
                ranks = children_of(os.getpid())
                send(number, ranks)
                if not ranks and not request.begun and _faults_of_the_ended() == faults:
                    with contextlib.suppress(OSError):
                        print(_NO_RANK, file=sys.stderr, flush=True)
                    os._exit(PREEMPTED)


def send(number: int, ranks: Iterable[int]) -> None:
    """Send a signal to processes, of which some may have ended."""
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):  # the rank has just ended
            os.kill(rank, number)


def _faults_of_the_ended() -> int:
    """Return the page faults of all children that have ended. The number changes when another child ends."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt


# The process from which a launcher forks its ranks.


def leave_signals_to_launcher() -> None:
    """Take no signal from here on, in a fork of a launcher, which tells the ranks."""
    signal.pthread_sigmask(signal.SIG_BLOCK, NOTED)
    if (wake := signal.set_wakeup_fd(-1)) >= 0:
        os.close(wake)  # the launcher's thread ends when nobody has it open


def noted_again() -> None:
    """Let signals end this process, which is a rank now, until it notes them; also those since its fork."""
    for number in _to_note():
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NOTED)


# A verb other than train, and the processes that it starts.


class CtrlC:
    """Notes a Ctrl-C in the block, where it raises KeyboardInterrupt; a second one ends the process at once.

    `seen` outlives the exception: a library may turn it into another one, as imports of extensions do. A process that
    was started with SIGINT ignored, as a shell's `&` does, goes on ignoring it.
    """

    def __init__(self) -> None:
        self.seen = False

    def __enter__(self) -> Self:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Note no Ctrl-C from here on."""
        if signal.getsignal(signal.SIGINT) == self._note:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        raise KeyboardInterrupt


def sigterm_unwinds() -> AbstractContextManager[None]:
    """Let SIGTERM unwind the block, so that what it has started ends, too."""
    return _handled([signal.SIGTERM], lambda number, frame: sys.exit(128 + number))


@contextmanager
def sigterm_noted() -> Iterator[list[int]]:
    """Note SIGTERM in the list until the end of the block, which ends the process itself when that is safe."""
    noted = list[int]()
    with _handled([signal.SIGTERM], lambda number, frame: noted.append(number)):
        yield noted


def end_noted() -> threading.Event:
    """Return an event that SIGTERM and SIGINT set from here on."""
    asked = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: asked.set())
    return asked


@contextmanager
def starts_deaf() -> Iterator[None]:
    """Start processes in the block that a Ctrl-C does not reach. It goes to all processes of a terminal, and one whose
    imports it breaks prints a traceback. The process that started them ends them.
    """
    from multiprocessing import resource_tracker  # its import takes longer than this module's

    resource_tracker.ensure_running()  # its start would end the block
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stay_deaf() -> None:
    """Ignore Ctrl-C in a process that started deaf, but let its work take SIGINT by a handler of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
