"""Signals to the launcher, in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

HEARS = """
import os, signal, sys
from alignedserve.launch.serve import Signals

first, second = (signal.Signals(int(number)) for number in sys.argv[1:])
signals, told = Signals(), []
signals.hear()
signals._tell = lambda: told.append(None)
os.kill(os.getpid(), first)
os.kill(os.getpid(), second)
print(len(told))
signals.ignore()
for number in (first, second):
    os.kill(os.getpid(), number)
"""


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
    command = [sys.executable, "-c", HEARS, str(int(first)), str(int(second))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{times}\n"), done.stderr


def test_what_nohup_starts_does_not_hear_of_terminals() -> None:
    command = [sys.executable, "-c", HEARS, str(int(signal.SIGHUP)), str(int(signal.SIGTERM))]
    done = subprocess.run(["nohup", *command], capture_output=True, text=True)
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
