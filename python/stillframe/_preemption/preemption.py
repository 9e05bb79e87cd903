"""`preemption`: what a process does between a scheduler's signal and its end.

    entered ──a signal──▶ asked ──a boundary──▶ stopping ──the block ends──▶ over
                            │                                  ▲
                            └── no boundary in time: given up ─┘

A *boundary* is a point at which training can stop: a call of `should_stop` or `save`, or the end of
an optimizer's step.

The signal handlers run on the main thread and only set flags, so they may interrupt any code. The
training loop reads the flags at its boundaries. A thread of the block (`_watch`) keeps the time.
Python's wake-up descriptor tells it of signals at once, even while the main thread computes in C.
Shortly before the deadline the thread gives up the saves. At the deadline it ends a process that is
still in the block.

Several ranks agree on one boundary (`agreement.py`), and leave the block together.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Literal

from torch.optim import Optimizer

from stillframe._base import paths, threads
from stillframe._base.birth import ForkGuard
from stillframe._preemption import agreement, children, in_time
from stillframe._save.engine import Path
from stillframe._save.report import SaveReport
from stillframe._watch import gate
from stillframe.errors import StillframeError

log = logging.getLogger("stillframe")

MakeState = Callable[[], object]
Event = Literal["stop", "step", "save"]

_REPEATED_S = 0.1  # a signal that comes so soon after the first one is ignored
_PASSED_ON_S = 2.0  # the same under torchrun, which passes on the signals that it receives
_POLL_S = 0.005  # how often the main thread checks whether the ranks have agreed
_CHECK_S = 1.0  # how often the watching thread checks whether another rank was asked to stop
_END_BYTE = 0  # ends the watching thread; no signal has this number


def preemption(signals: Iterable[int] = (signal.SIGTERM,), deadline: float = 25.0) -> Preemption:
    """Save the state after the last step when a scheduler is about to take the machine away.

    Use it as a context manager around the training loop, in the main thread:

        with stillframe.preemption() as p:
            for batch in loader:
                train(batch)
                if p.should_stop():
                    stillframe.save(state(), "last.pt")
                    break

    Or register once what to save, and then only call `should_stop`:

        with stillframe.preemption() as p:
            p.save(state, "last.pt")
            for batch in loader:
                train(batch)
                if p.should_stop():
                    break

    The block installs handlers and restores the previous ones at its end. After a signal, the end
    of the block waits until the saves under way are durable. Then it calls the previous handler,
    and ends the process with status 128 + signal (`SystemExit`). A second signal ends the process
    at once. See docs/preemption.md.

    Args:
        signals: The signals that announce the end.
        deadline: Seconds from the first signal to the end of the process. A save that cannot be
            durable in time is given up: the old file stays, and a line in the log says why.

    Raises:
        TypeError, ValueError: A signal that cannot be handled, or an unusable deadline.
    """
    return Preemption(signals, deadline)


class _BlockEndedExit(SystemExit):
    """The exception with which a block ends the process."""


class Preemption:
    """One block: see `preemption`."""

    def __init__(self, signals: Iterable[int], deadline: float) -> None:
        self.signals = _checked_signals(signals)
        """The numbers of the signals that announce the end."""
        self._deadline_s = in_time.checked_deadline(deadline)
        self._reserve_s = min(1.0, self._deadline_s / 5)  # from the end of saves to the deadline
        self._birth = ForkGuard("this preemption")
        self._handler = self._on_signal  # kept, because each `self._on_signal` is another object
        self._previous_handlers: dict[int, Any] = {}  # the handlers before the block, by signal
        self._was_entered = False  # `__enter__` was called
        self._is_running = False  # the block is running
        self._only_waits = False  # the block has ended, and only waits for saves

        # Signals.
        self._pipe = (-1, -1)  # the read end and the write end, for numbers of signals
        self._is_wakeup_fd = False  # Python writes each signal's number to the pipe
        self._own_signal: int | None = None  # the first signal that this process itself got
        # The first signal that any rank got, and the `time.monotonic()` at which it came.
        self._first_signal: tuple[int, float] | None = None
        self._must_raise = False  # the next call of the handler raises `_BlockEndedExit`

        # Boundaries.
        self._must_check = True  # the next boundary must check whether to stop
        self._ranks_known = False  # `_join_ranks` has found out whether there are other ranks
        self._ranks: agreement.Agreement | None = None  # None without other ranks
        self._nr_stops = self._nr_steps = self._nr_saves = 0  # the fields of `agreement.Counts`
        self._steps_at_last_save = -1  # `_nr_steps` at the last call of `save`; -1 before the first
        self._has_reached_stop = False  # the boundary at which training stops was reached
        self._make_state_of: dict[str, MakeState] = {}  # the functions given to `save`, by path
        # By path: the report of the save, and `_nr_stops` and `_nr_steps` at that time.
        self._saved: dict[str, tuple[SaveReport | None, int, int]] = {}

    @property
    def requested(self) -> bool:
        """Whether this process, or another rank that it knows of, was asked to stop."""
        return self._first_signal is not None

    def should_stop(self) -> bool:
        """Return whether to stop training now. Call this once at the end of each step.

        When this returns True, the state that `save` has registered is durable. All ranks get True
        at the same call, so all ranks must call this equally often.
        """
        self._nr_stops += 1
        return self._must_check and self._save_if_stopping_at_boundary("stop")

    def save(self, make_state: MakeState, path: Path) -> SaveReport | None:
        """Save the object that `make_state()` returns to `path`, at the step boundary where
        training stops.

        Before a signal, a call only registers the save. One call is enough. The save is made by the
        call of `should_stop` that returns True, or at the end of the block. If the loop never calls
        `should_stop`, the save is made at the end of an optimizer's step, and the process ends
        there. After a signal, a call saves at once; with several ranks, at the boundary at which
        all stop.

        Args:
            make_state: Called without arguments on the main thread.
            path: As for `stillframe.save`.

        Returns:
            The report of the save; None if the save was only registered, has failed or was given
            up.

        Raises:
            TypeError, ValueError: `make_state` is not callable, or `path` is not a local path.
            ForkError: In a forked child.
        """
        self._birth.refuse_forked_child()
        if not callable(make_state):
            raise TypeError(f"make_state has to be callable, not {type(make_state).__name__}")
        name = paths.parse_local_path(path)
        self._nr_saves += 1
        self._steps_at_last_save = self._nr_steps
        if not (self._must_check and self._save_if_stopping_at_boundary("save")):
            self._make_state_of[name] = make_state
            return None
        is_saved, calls_should_stop = name in self._saved, self._nr_stops > 0
        if is_saved and not calls_should_stop and not self._has_reached_stop:
            # The loop has saved after the signal and goes on. It never calls `should_stop`, so end
            # the process here.
            raise _BlockEndedExit(self._exit_status())
        self._make_state_of[name] = make_state
        self._save_registered("save")
        report, _, _ = self._saved[name]
        return report

    # ---- the block ----

    def __enter__(self) -> Preemption:
        if threading.current_thread() is not threading.main_thread():
            raise StillframeError(
                "stillframe.preemption has to be entered in the main thread: Python runs signal"
                " handlers there only"
            )
        if self._was_entered:
            raise StillframeError("this preemption was entered before: make another one")
        for number in self.signals:
            if signal.getsignal(number) is None:
                raise StillframeError(
                    f"the handler of {_name(number)} was not installed by Python, so it could not"
                    " be restored"
                )
        self._was_entered = True
        self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        watching = threading.Thread(target=self._watch, name="sf-preempt", daemon=True)
        threads.start(watching)
        try:
            self._join_ranks()
            self._is_running = True
            _register_for_optimizer_steps(self)
            children.watch(self)
            for number in self.signals:
                self._previous_handlers[number] = signal.signal(number, self._handler)
            previous_fd = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            self._is_wakeup_fd = previous_fd < 0  # there was none
            if not self._is_wakeup_fd:  # keep the descriptor of an event loop
                signal.set_wakeup_fd(previous_fd)
        except BaseException:
            self._restore_handlers()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._birth.in_forked_child():
            return
        try:
            if self._first_signal is not None:
                self._finish_saves(error)
            elif self._ranks is not None:
                self._ranks.leave(None)
        finally:
            self._restore_handlers()
        # A signal may have come after the first check and before the handlers were restored.
        if self._first_signal is not None and not self._only_waits:
            self._finish_saves(error)
        # If only another rank got a signal, the program goes on after the block. An error of the
        # block propagates.
        if self._own_signal is None or not _ended_without_error(error):
            return
        previous = self._previous_handlers[self._own_signal]
        if callable(previous):
            previous(self._own_signal, None)
        raise _BlockEndedExit(self._exit_status()) from None

    def _finish_saves(self, error: BaseException | None) -> None:
        """Make the registered saves, and wait for all saves."""
        if not isinstance(error, _BlockEndedExit) and _ended_without_error(error):
            self._save_registered(None)  # the end of the loop is a boundary too
        self._only_waits = True
        in_time.finish(self._save_deadline())
        if self._ranks is not None:
            self._ranks.leave(self._save_deadline() if _ended_without_error(error) else None)

    def _restore_handlers(self) -> None:
        """Restore the handlers. End the watching thread, unless the process is about to end.

        A signal that comes meanwhile reaches either this block or the previous handler, never both.
        """
        children.unwatch(self)
        _blocks.pop(id(self), None)
        if self._is_wakeup_fd:
            self._is_wakeup_fd = False
            current = signal.set_wakeup_fd(-1)
            if current not in (-1, self._pipe[1]):  # other code has set its own descriptor
                signal.set_wakeup_fd(current)
        for number, previous in self._previous_handlers.items():
            if signal.getsignal(number) == self._handler:
                signal.signal(number, previous)
        self._is_running = False
        process_ends = self._own_signal is not None  # then the thread still keeps the deadline
        if not process_ends:
            with contextlib.suppress(BlockingIOError):  # the pipe is full of signals
                os.write(self._pipe[1], bytes([_END_BYTE]))

    def forget(self) -> None:
        """Restore the handlers in a forked child."""
        self._is_running = self._must_check = self._must_raise = False
        if self._is_wakeup_fd:
            signal.set_wakeup_fd(-1)
        for number, previous in self._previous_handlers.items():
            if signal.getsignal(number) == self._handler:
                signal.signal(number, previous)
        for descriptor in self._pipe:
            os.close(descriptor)
        _blocks.clear()

    # ---- signals ----

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Record a signal. This may interrupt any line of the main thread."""
        # Other code may have installed a handler inside the block, and this handler may call
        # `_on_signal` even after the block.
        if not self._is_running:
            previous = self._previous_handlers.get(number)
            if callable(previous):
                previous(number, frame)
            return
        if self._must_raise:  # `_give_up` has sent this signal
            self._must_raise = False
            raise _BlockEndedExit(self._exit_status())
        if not self._is_wakeup_fd:
            with contextlib.suppress(BlockingIOError):  # the pipe is full of earlier signals
                os.write(self._pipe[1], bytes([number]))
        self._record_own_signal(number)

    def _record_own_signal(self, number: int) -> None:
        """Record the first signal that this process gets, and tell the other ranks."""
        if self._own_signal is not None:
            return
        self._own_signal = number
        now = time.monotonic()
        self._request_stop(number, now)
        if self._ranks is not None:
            self._ranks.ask(number, now)

    def _request_stop(self, number: int, moment: float) -> None:
        """Have the next boundary check whether to stop. Called when any rank got a signal."""
        if self._first_signal is None:
            self._first_signal = (number, moment)
        self._must_check = True

    def _watch(self) -> None:
        """Give up the saves shortly before the deadline. End the process at the deadline or at a
        second signal. Runs on the block's thread."""
        under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        ignore_for_s = _PASSED_ON_S if under_torchrun else _REPEATED_S
        first_signal_at: float | None = None  # when this process got its first signal
        given_up = False
        while True:
            number = self._wait_for_signal_byte(given_up)
            now = time.monotonic()
            if number == _END_BYTE:
                break
            # Not after `_give_up`, which sends a signal itself.
            if number is not None and not given_up:
                self._record_own_signal(number)
                if first_signal_at is None:
                    first_signal_at = now
                elif now - first_signal_at > ignore_for_s:
                    self._end_process_now("a second signal came")
            if self._first_signal is None:
                continue
            if now >= self._leave_deadline() and not given_up:
                given_up = True
                self._give_up()
            if now >= self._end_deadline():
                if self._is_running or not threading.main_thread().is_alive():
                    self._end_process_now("the deadline has passed")
                break  # the main thread has left the block, and goes on
        os.close(self._pipe[0])
        os.close(self._pipe[1])

    def _wait_for_signal_byte(self, given_up: bool) -> int | None:
        """Wait for a byte from the pipe, and return it: one of `signals`, or `_END_BYTE`. Return
        None when it is time to check the clock or the other ranks."""
        poll = select.poll()  # select() refuses descriptors above 1023
        poll.register(self._pipe[0], select.POLLIN)
        while True:
            left_s: float | None = None  # None: wait without a limit
            if self._first_signal is not None:
                end = self._end_deadline() if given_up else self._leave_deadline()
                left_s = max(0.0, end - time.monotonic())
            elif self._ranks is not None or not self._ranks_known:
                left_s = _CHECK_S  # another rank may be asked to stop
            if not poll.poll(None if left_s is None else 1000 * left_s):
                return None
            (number,) = os.read(self._pipe[0], 1)
            if number == _END_BYTE or number in self.signals:
                return int(number)

    def _give_up(self) -> None:
        """Give up the saves under way, and have the main thread leave the block."""
        if self._only_waits or not self._is_running:
            return
        if not in_time.give_up() and not self._has_reached_stop:
            log.warning(
                "stillframe: no step boundary was reached within %.3g s of %s: nothing was saved,"
                " and the old files stay",
                time.monotonic() - self._first_signal_time(),
                _name(self._first_signal_number()),
            )
        self._must_raise = True
        # Python's handlers run on the main thread: the handler raises `_BlockEndedExit` there.
        main = threading.main_thread().ident
        if main is not None:
            signal.pthread_kill(main, self.signals[0])

    def _end_process_now(self, why: str) -> None:
        """End the process at once, with its daemonic children."""
        log.warning("stillframe: %s: the process ends, and saves under way are given up", why)
        for child in multiprocessing.active_children():
            if child.daemon:
                child.kill()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(self._exit_status())

    # ---- boundaries ----

    def _save_if_stopping_at_boundary(self, event: Event) -> bool:
        """Return whether training stops at this boundary. If so, save what is registered, except at
        a call of `save`, which does that itself."""
        if self._has_reached_stop:
            return True
        if not self._ranks_known:
            self._join_ranks()
        self._must_check = False  # before `_first_signal` is read, because a signal sets both
        if self._first_signal is None:
            return False
        self._must_check = True  # if training goes on, the next boundary has to check too
        if not self._decide_whether_to_stop_here(event):
            return False
        # Without other ranks, a call of `save` is not the end: `should_stop` may still be called.
        self._has_reached_stop = event != "save" or self._ranks is not None
        if event != "save":
            self._save_registered(event)
        return True

    def _decide_whether_to_stop_here(self, event: Event) -> bool:
        """Return whether training stops at this boundary after a signal. With several ranks, wait
        until they have agreed. Raise `_BlockEndedExit` if they have agreed without this rank."""
        if self._ranks is None:
            if event != "step":
                return True  # every call of `should_stop` and `save` is a boundary
            # The end of this step is a boundary only if it was the next one when the step began.
            counts_before_step = self._counts()._replace(steps=self._nr_steps - 1)
            next_boundary = agreement.next_boundary([counts_before_step])
            return self._counts().reaches(next_boundary)
        while self._ranks.limit is None and self._ranks.why_left_out is None:
            time.sleep(_POLL_S)
        if self._ranks.why_left_out is not None:
            log.warning("stillframe: nothing is saved: %s", self._ranks.why_left_out)
            raise _BlockEndedExit(self._exit_status())
        assert self._ranks.limit is not None
        return self._counts().reaches(self._ranks.limit)

    def stepped(self) -> None:
        """Count the end of an optimizer's step, and stop there if that is the boundary."""
        if not self._is_running or threading.current_thread() is not threading.main_thread():
            return
        self._nr_steps += 1
        if (
            self._must_check
            and not self._has_reached_stop
            and self._save_if_stopping_at_boundary("step")
        ):
            # Without a signal of its own, this process ends without an error.
            raise _BlockEndedExit(self._exit_status() if self._own_signal is not None else 0)

    def _save_registered(self, event: Event | None) -> None:
        """Make the registered saves, except those that were made since the last step. `event` is
        the boundary; None at the end of the block."""
        for name, make_state in list(self._make_state_of.items()):
            # The counts at the last save of this state; -1 if it was never saved.
            _, saved_at_stop, saved_at_step = self._saved.get(name, (None, -1, -1))
            # The end of a step may have saved the state right before this call of `should_stop`.
            may_be_saved_by_step = event == "stop" and saved_at_step > 0
            same_stop = saved_at_stop == self._nr_stops or may_be_saved_by_step
            is_saved = same_stop and saved_at_step == self._nr_steps
            if not is_saved:
                report = in_time.save(make_state, name, self._save_deadline())
                self._saved[name] = report, self._nr_stops, self._nr_steps

    def _join_ranks(self) -> None:
        """Join the other ranks, if there is a process group. Without one, the first boundary calls
        this again, because the group may be made inside the block."""
        self._ranks = agreement.join(self._deadline_s, self._request_stop, self._counts)
        is_first_boundary = self._is_running  # otherwise the block is being entered
        self._ranks_known = self._ranks is not None or is_first_boundary
        if self._ranks is not None and self._first_signal is not None:
            self._ranks.ask(*self._first_signal)

    def _counts(self) -> agreement.Counts:
        return agreement.Counts(
            self._nr_stops, self._nr_steps, self._nr_saves, self._steps_at_last_save
        )

    # ---- the signal and its deadlines ----

    def _first_signal_number(self) -> int:
        """Return the signal that some rank got first; before any signal, the first of `signals`."""
        return self.signals[0] if self._first_signal is None else self._first_signal[0]

    def _first_signal_time(self) -> float:
        """Return the `time.monotonic()` at which the first signal came."""
        return time.monotonic() if self._first_signal is None else self._first_signal[1]

    def _save_deadline(self) -> float:
        """Return the moment by which saves have to be durable."""
        return self._end_deadline() - self._reserve_s

    def _leave_deadline(self) -> float:
        """Return the moment by which the main thread has to leave the block."""
        return self._save_deadline() + self._reserve_s / 4

    def _end_deadline(self) -> float:
        """Return the moment by which the process has to end."""
        return self._first_signal_time() + self._deadline_s

    def _exit_status(self) -> int:
        """Return the status by which shells report that a signal ended the process."""
        return 128 + (self._own_signal or self._first_signal_number())


# ---- steps of optimizers ----

_blocks: dict[int, Preemption] = {}  # the blocks that are running, by their ids


class _StepObserver:
    """Tells the running blocks when an optimizer's step ends; an implementation of
    `gate.OptimizerDataReaders` that makes no step wait."""

    def wait(self, optimizer: Optimizer) -> None:
        pass

    def stepped(self, optimizer: Optimizer) -> None:
        for block in list(_blocks.values()):
            block.stepped()

    def concerns(self, optimizer: Optimizer) -> bool:
        return False


_reader: _StepObserver | None = None  # registered with the gate once for all blocks


def _register_for_optimizer_steps(block: Preemption) -> None:
    """Call `block.stepped` at the end of every optimizer's step from now on."""
    global _reader
    if _reader is None:
        _reader = _StepObserver()
        gate.add_readers(_reader)
    _blocks[id(block)] = block


# ---- arguments ----


def _checked_signals(signals: Iterable[int]) -> tuple[int, ...]:
    """Return each signal once. Raise TypeError or ValueError for an invalid signal."""
    if isinstance(signals, (str, bytes)) or not isinstance(signals, Iterable):
        raise TypeError(f"signals has to be a tuple of signals, not {signals!r}")
    numbers = tuple(dict.fromkeys(signals))
    if not numbers:
        raise ValueError("signals is empty: give one at least, as in signals=(signal.SIGTERM,)")
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"signals has to be a tuple of signals, not of {number!r}")
        if number not in signal.valid_signals() or number in (signal.SIGKILL, signal.SIGSTOP):
            raise ValueError(f"{number!r} is not a signal that can be handled")
    return tuple(map(int, numbers))


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _ended_without_error(error: BaseException | None) -> bool:
    """Return whether the block ended neither by an error nor by `sys.exit` with a status."""
    if error is None or isinstance(error, _BlockEndedExit):
        return True
    return isinstance(error, SystemExit) and error.code is None
