"""In a process of its own: neither can be undone."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import asyncio, gc, resource
from pathlib import Path
from alignedserve.process import steady
from alignedserve.process.steady import settle

def num_places():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("FDSize"))

resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 4096))
before, open_before = num_places(), len(list(Path("/proc/self/fd").iterdir()))
settle()
assert before < 1024 <= num_places(), (before, num_places())
assert len(list(Path("/proc/self/fd").iterdir())) == open_before
assert gc.get_freeze_count() > 1000
settle()

# thousands of requests: all of them are not looked through while they come, and are when there is nothing to do
num_all = gc.get_stats()[2]["collections"]
requests = [[] for _ in range(100_000)]
assert gc.get_stats()[2]["collections"] == num_all

async def idle():
    is_busy, looks = True, 0
    def is_idle():
        nonlocal looks
        looks += 1
        return not is_busy
    steady.IDLE_LOOK_S = 0.0
    collecting = asyncio.create_task(steady.collect_when_idle(is_idle))
    while looks < 3:
        await asyncio.sleep(0)
    assert gc.get_stats()[2]["collections"] == num_all
    is_busy = False
    while gc.get_stats()[2]["collections"] == num_all:
        await asyncio.sleep(0)
    collecting.cancel()

asyncio.run(idle())
"""


def test_room_for_files_is_there_and_what_is_old_is_not_looked_through_again() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
