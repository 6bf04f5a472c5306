"""The process that `alignedserve serve` begins as. It takes the signals, and its child, the launcher, does the work.

Ray can't be imported, started and stopped in a process that a signal may interrupt: exceptions are lost in its native
code or break it, and it replaces handlers. So this process never imports it. Until the launcher reports that the system
is up, a signal kills the launcher and all its descendants. Later signals are passed on as orders to stop. However the
launcher ends, nothing that it started outlives this process; and if this process is killed, the launcher is, too.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import time
import traceback
from asyncio import get_running_loop
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import NoReturn

from alignedserve.launch.console import Alarm, finish_output
from alignedserve.launch.leftovers import descendants
from alignedserve.launch.signals import hold_signals, ignore_signals, on_signals, release_signals
from alignedserve.types import shortened

# What prctl of Linux is asked for
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# The launcher's report that signals are to be passed on, and the order that passes one on.
_UP, _STOP = b"+", b"s"
# The most characters of an error, and bytes of all reports.
_MAX_CHARS, _MAX_BYTES = 4_000, 60_000
_POLL_S = 0.01
# seconds that killed processes get to end
KILL_S = 10.0


class Stopped(Exception):
    """An order arrived while the launcher waited for nodes."""


class Orders:
    """The launcher's end of its link to the first process."""

    def __init__(self, orders: int, reports: int) -> None:
        self._orders, self._reports = orders, reports
        self._is_up = False

    def up(self) -> None:
        """Asks for orders instead of a kill from here on. Safe to repeat."""
        if not self._is_up:
            self._is_up = True
            os.write(self._reports, _UP)

    def pause(self, seconds: float) -> None:
        """Waits. Raises Stopped at an order."""
        if select.select([self._orders], [], [], seconds)[0]:
            raise Stopped

    def tell(self, told: Callable[[], object]) -> None:
        """Calls `told` in the event loop for each order, and for those that arrived before."""

        def read() -> None:
            for _ in os.read(self._orders, select.PIPE_BUF):
                told()

        get_running_loop().add_reader(self._orders, read)

    def failed(self, error: Exception) -> None:
        kind = next(each for each in (ValueError, Stopped, RuntimeError) if isinstance(error, each))
        os.write(self._reports, json.dumps([kind.__name__, shortened(str(error), _MAX_CHARS)]).encode())


def run_in_child(work: Callable[[Orders], None], say: Callable[[str], None]) -> bool:
    """Runs `work` in a child process. Returns whether it ended by itself or after an order; False if a signal ended it
    while it started. Raises its ValueError or RuntimeError. No descendant is left, except those of before, what they
    have started, and their daemons; `say` gets a line about those that can't be killed."""
    before = descendants(os.getpid())
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    hold_signals()
    child = _Child(work)
    on_signals(child.came)
    release_signals()
    status = child.wait()
    _kill_descendants(before, say)
    ignore_signals()
    return child.outcome(status)


class _Child:
    def __init__(self, work: Callable[[Orders], None]) -> None:
        orders, self._orders = os.pipe()
        self._reports, reports = socket.socketpair()
        self._reports.setblocking(False)
        # whether there was a signal, whether one killed the child, and whether the child has ended
        self._has_come = self._is_killed = self._has_ended = False
        parent, self._pid = os.getpid(), os.fork()
        if not self._pid:
            os.close(self._orders)
            self._reports.close()
            _work(work, Orders(orders, reports.fileno()), parent)
        os.close(orders)
        reports.close()

    def came(self, number: int) -> None:
        """Handles a signal. A second one asks for a faster end, except that of a terminal that closes. It may interrupt
        this function."""
        if self._has_ended or (number == signal.SIGHUP and self._has_come):
            return
        self._has_come = True
        if self._is_up():
            with suppress(BrokenPipeError):
                os.write(self._orders, _STOP)
        else:
            self._is_killed = True
            os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> int:
        """Returns the exit status, negative for a signal. Orphans of the child are waited for as well."""
        # The child is not waited for before `came` can't kill it any more: another process may get its number.
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)) and ended.si_pid != self._pid:
            os.waitpid(ended.si_pid, 0)
        self._has_ended = True
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def outcome(self, status: int) -> bool:
        if self._is_killed:
            return False
        if report := self._reported(_MAX_BYTES).removeprefix(_UP):
            kind, message = json.loads(report)
            if kind == Stopped.__name__:
                return False
            raise ValueError(message) if kind == ValueError.__name__ else RuntimeError(message)
        if status < 0:
            raise RuntimeError(f"the launcher died: signal {-status}")
        if status:
            raise SystemExit(status)
        return True

    def _is_up(self) -> bool:
        # It takes nothing, because a signal may interrupt it and ask the same.
        return self._reported(len(_UP), socket.MSG_PEEK) == _UP

    def _reported(self, num_bytes: int, flags: int = 0) -> bytes:
        with suppress(BlockingIOError):
            return self._reports.recv(num_bytes, flags)
        return b""


def _work(work: Callable[[Orders], None], orders: Orders, parent: int) -> NoReturn:
    """The child. It ends here, without code of libraries that would run at the end."""
    status = 1
    try:
        end_with_parent(signal.SIGKILL)
        hear_nothing()
        release_signals()
        if os.getppid() == parent:
            work(orders)
            status = 0
    except (ValueError, RuntimeError, Stopped) as error:
        orders.failed(error)
    except BaseException:
        traceback.print_exc()
    finally:
        finish_output()
        os._exit(status)


def end_with_parent(number: int) -> None:
    """Lets this process get a signal when its parent has ended."""
    _prctl(_PR_SET_PDEATHSIG, number)


def hear_nothing() -> None:
    """Lets signals pass that reach the launcher itself, as those of a terminal do. Its child processes do not inherit
    that."""
    on_signals(lambda number: None)


def _kill_descendants(spared: Collection[tuple[int, int]], say: Callable[[str], None]) -> None:
    """Kills all descendants other than those that are `spared`, and waits until they have ended."""
    deadline = time.monotonic() + KILL_S
    while left := [each for each in descendants(os.getpid(), spared) if _is_of_this_session(*each)]:
        if time.monotonic() > deadline:
            pids = ", ".join(str(pid) for pid, _ in left)
            return say(Alarm(f"killed processes have not ended after {KILL_S:g} s: {pids}"))
        for pid, _ in left:
            # One of another user can't be killed.
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            # It may not be a child yet: its parent has to end first.
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(_POLL_S)


def _is_of_this_session(pid: int, start: int) -> bool:
    """Everything that the launcher starts stays in this session. A descendant of another session is a daemon of a
    program that ran before, as in `agent & exec alignedserve serve`: orphans have this process as their parent."""
    try:
        return os.getsid(pid) == os.getsid(0)
    except ProcessLookupError:
        return False


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
