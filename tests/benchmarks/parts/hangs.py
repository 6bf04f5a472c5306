"""Starts a process in its own session that ignores SIGTERM, and neither of them ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.benchmarks.parts.record import options, write

CHILD = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
signal.pause()
"""

if __name__ == "__main__":
    out = options().out
    child = subprocess.Popen([sys.executable, "-c", CHILD], start_new_session=True, stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"ready\n"
    write(out, {"part": "hangs", "case": "a", "pids": [os.getpid(), child.pid], "summary": "as it should"})
    signal.pause()
