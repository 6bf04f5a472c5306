"""In a process of its own: neither can be undone."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import gc, resource
from pathlib import Path
from alignedserve.steady import settle

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
"""


def test_room_for_files_is_there_and_what_is_old_is_not_looked_through_again() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
