"""What a process uses, as the kernel reports it."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from alignedserve.process.usage import usage_of


def test_cpu_time_and_memory_of_a_process() -> None:
    used = usage_of(os.getpid())
    assert used and used.resident_bytes > 10 << 20
    begun_s = time.process_time()
    while time.process_time() - begun_s < 0.1:
        pass
    again = usage_of(os.getpid())
    # in hundredths of a second
    assert again and again.cpu_s - used.cpu_s >= 0.08


def test_a_process_whose_name_looks_like_fields() -> None:
    code = "open('/proc/self/comm', 'w').write('a) 1 (2 3'); print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout and process.stdout.readline()
        used = usage_of(process.pid)
        assert used and 0 <= used.cpu_s < 60 and 1 << 20 < used.resident_bytes < 1 << 30
        process.communicate(b"\n")
    assert usage_of(process.pid) is None
