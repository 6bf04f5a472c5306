"""Signals to the launcher, in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from alignedserve.launch.serve import Signals
from tests.launch.forked import in_a_fork

ROOT = Path(__file__).parents[2]


def hear(first: signal.Signals, second: signal.Signals) -> int:
    """Sends both to this process. Returns how often the launcher was told to stop, or in a hurry."""
    signals, told = Signals(), list[None]()
    signals.hear()
    signals._tell = lambda: told.append(None)
    for number in (first, second):
        os.kill(os.getpid(), number)
    num_told = len(told)
    signals.ignore()
    for number in (first, second):
        os.kill(os.getpid(), number)
    assert len(told) == num_told
    return num_told


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


UNDER_NOHUP = """
import signal
from tests.launch.test_signals import hear

print(hear(signal.SIGHUP, signal.SIGTERM))
"""


def test_what_nohup_starts_does_not_hear_of_terminals() -> None:
    command = ["nohup", sys.executable, "-c", UNDER_NOHUP]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


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
