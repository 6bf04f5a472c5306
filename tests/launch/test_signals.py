"""Signals to the launcher, in processes of their own."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

from alignedserve.launch import first_process
from alignedserve.launch.first_process import Orders, _Child, run_in_child
from alignedserve.launch.leftovers import descendants, end
from alignedserve.launch.process_supervisor import ProcessFailed
from alignedserve.launch.signals import on_signals
from tests.launch.forked import in_a_fork

ROOT = Path(__file__).parents[2]


def count_orders(orders: Orders) -> None:
    """Raises ValueError with the number of orders, when the first process closes its end."""
    orders.up()
    num_told = 0
    while told := os.read(orders._orders, 1):
        num_told += len(told)
    raise ValueError(num_told)


def hear(first: signal.Signals, second: signal.Signals, hangup: signal.Handlers = signal.SIG_DFL) -> int:
    """Sends both to this process, which began with `hangup` as its action for SIGHUP. Returns how often the launcher
    was told to stop, or in a hurry."""
    signal.signal(signal.SIGHUP, hangup)
    child = _Child(count_orders)
    on_signals(child.came)
    while not child._is_up():
        pass
    for number in (first, second):
        os.kill(os.getpid(), number)
    os.close(child._orders)
    try:
        child.outcome(child.wait())
    except ValueError as told:
        # The child has ended, and no signal ends this process any more.
        for number in (first, second):
            os.kill(os.getpid(), number)
        return int(str(told))
    raise AssertionError("it did not count")


@pytest.mark.parametrize(
    ("first", "second", "times"),
    [
        (signal.SIGTERM, signal.SIGINT, 2),
        (signal.SIGHUP, signal.SIGTERM, 2),
        # a terminal's, and its shell's
        (signal.SIGHUP, signal.SIGHUP, 1),
        # a terminal that closes behind a Ctrl-C
        (signal.SIGINT, signal.SIGHUP, 1),
    ],
)
def test_who_asks_again_is_in_a_hurry_but_not_a_terminal(
    first: signal.Signals, second: signal.Signals, times: int
) -> None:
    assert in_a_fork(hear, first, second) == times


def test_what_nohup_starts_does_not_hear_of_terminals() -> None:
    assert in_a_fork(hear, signal.SIGHUP, signal.SIGTERM, signal.SIG_IGN) == 1


def hear_two_at_once(moment: int) -> tuple[int, bool]:
    """Sends a second signal with the profiler's event of this number, counted from the first one. Returns how often the
    launcher was told to stop, and whether there was such an event."""
    child = _Child(count_orders)
    numbers, is_sent = count(), False

    def on_event(frame: object, event: str, arg: object) -> None:
        nonlocal is_sent
        if next(numbers) == moment:
            is_sent = True
            os.kill(os.getpid(), signal.SIGINT)

    def came(number: int) -> None:
        if number == signal.SIGTERM:
            sys.setprofile(on_event)
        child.came(number)
        if number == signal.SIGTERM:
            sys.setprofile(None)

    on_signals(came)
    select.select([child._reports], [], [])
    os.kill(os.getpid(), signal.SIGTERM)
    os.close(child._orders)
    try:
        child.outcome(child.wait())
    except ValueError as told:
        return int(str(told)), is_sent
    raise AssertionError("it did not count")


def test_two_signals_at_once_are_two_orders() -> None:
    for moment in count():
        told, is_sent = in_a_fork(hear_two_at_once, moment)
        if not is_sent:
            break
        assert told == 2, f"the second one at event {moment}"
    assert moment > 5


def wait_for_nodes(orders: Orders) -> None:
    orders.up()
    os.kill(os.getppid(), signal.SIGTERM)
    orders.pause(60)


def test_an_order_ends_a_launcher_that_waits_for_nodes() -> None:
    assert in_a_fork(run_in_child, wait_for_nodes, print) is False


def wait_for_ever(orders: Orders) -> None:
    """With a process that ignores all but SIGKILL, and has another parent when its own is killed."""
    subprocess.Popen(["sh", "-c", "trap '' INT TERM HUP; sleep 600 & wait"])
    os.kill(os.getppid(), signal.SIGTERM)
    signal.pause()


def start_and_be_signalled() -> tuple[bool, list[tuple[int, int]]]:
    return run_in_child(wait_for_ever, print), descendants(os.getpid())


def test_a_signal_during_the_start_ends_all_that_was_begun() -> None:
    assert in_a_fork(start_and_be_signalled) == (False, [])


def start_beside_another() -> tuple[bool, bool]:
    """As from a shell that started another program and then became this one. That program starts one more meanwhile.
    Returns whether both are left, and nothing else is."""
    script = "read line; sleep 600 & echo started; wait"
    other = subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def work(orders: Orders) -> None:
        assert other.stdin and other.stdout
        os.write(other.stdin.fileno(), b"\n")
        os.read(other.stdout.fileno(), 10)
        subprocess.Popen(["sleep", "600"])

    is_done = run_in_child(work, print)
    left = descendants(os.getpid())
    for pid, _ in left:
        os.kill(pid, signal.SIGKILL)
    other.wait()
    end(set(left))
    return is_done, left[:1] == [(other.pid, left[0][1])] and len(left) == 2


def test_what_ran_before_is_left_alone() -> None:
    assert in_a_fork(start_beside_another) == (True, True)


def start_beside_one_with_a_daemon() -> tuple[bool, bool]:
    """As above, with a program that starts a daemon meanwhile: a process in a session of its own, whose parent exits.
    Returns whether only both are left."""
    script = "read line; (setsid sh -c 'echo $$; exec sleep 600' &); wait; read line"
    other = subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    daemons: list[int] = []

    def work(orders: Orders) -> None:
        assert other.stdin and other.stdout
        os.write(other.stdin.fileno(), b"\n")
        raise ValueError(os.read(other.stdout.fileno(), 10).decode())

    try:
        run_in_child(work, print)
    except ValueError as error:
        daemons.append(int(str(error)))
    left = descendants(os.getpid())
    for pid, _ in left:
        os.kill(pid, signal.SIGKILL)
    other.wait()
    end(set(left))
    return bool(daemons), {pid for pid, _ in left} == {other.pid, *daemons}


def test_a_daemon_of_what_ran_before_is_left_alone() -> None:
    assert in_a_fork(start_beside_one_with_a_daemon) == (True, True)


def start_one_that_does_not_end() -> tuple[bool, list[str]]:
    """As a process that waits in the kernel, for a disk that is gone, and does not die before that answers."""
    said: list[str] = []

    def work(orders: Orders) -> None:
        subprocess.Popen(["sleep", "600"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "kill", lambda pid, number: None)
        patch.setattr(first_process, "KILL_S", 0.1)
        is_done = run_in_child(work, said.append)
    left = descendants(os.getpid())
    for pid, _ in left:
        os.kill(pid, signal.SIGKILL)
    end(set(left))
    return is_done, [line.replace(str(left[0][0]), "PID") for line in said]


def test_what_can_not_be_killed_is_told_and_holds_up_nothing() -> None:
    line = "killed processes have not ended after 0.1 s: PID"
    assert in_a_fork(start_one_that_does_not_end, limit_s=30) == (True, [line])


def fail(orders: Orders) -> None:
    raise {
        "value": ValueError("port=1: no"),
        "process": ProcessFailed("decode-0 died"),
        "bug": KeyError("x"),
    }[FAILS[0]]


FAILS: list[str] = []


def failure(kind: str) -> str:
    FAILS[:] = [kind]
    try:
        run_in_child(fail, print)
    except (ValueError, RuntimeError, SystemExit) as error:
        return repr(error)
    return "none"


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("value", "ValueError('port=1: no')"),
        ("process", "RuntimeError('decode-0 died')"),
        ("bug", "SystemExit(1)"),
    ],
)
def test_the_first_process_fails_like_the_launcher(kind: str, error: str) -> None:
    assert in_a_fork(failure, kind) == error


def be_killed(orders: Orders) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def after_a_kill() -> str:
    with pytest.raises(RuntimeError) as caught:
        run_in_child(be_killed, print)
    return str(caught.value)


def test_a_launcher_that_is_killed_is_an_error() -> None:
    assert in_a_fork(after_a_kill) == "the launcher died: signal 9"


SAYS = """
import os, sys
from alignedserve.cli.serve import _say

os.close(int(sys.argv[1]))
_say("one")
_say("two")
print("three", file=sys.stderr)
"""


def test_what_nobody_can_hear_any_more_is_no_error() -> None:
    reader, writer = os.pipe()
    command = [sys.executable, "-c", SAYS, str(reader)]
    with open(writer, "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, pass_fds=[reader])
    os.close(reader)
    assert process.wait() == 0
