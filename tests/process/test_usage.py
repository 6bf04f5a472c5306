"""What a process uses, as the kernel reports it."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from alignedserve.process.usage import Usage, UsageMeter


def test_cpu_time_and_memory_of_a_process() -> None:
    used = UsageMeter().usage_of(os.getpid())
    assert used and used.resident_bytes > 10 << 20
    begun_s = time.process_time()
    while time.process_time() - begun_s < 0.1:
        pass
    again = UsageMeter().usage_of(os.getpid())
    # in hundredths of a second
    assert again and again.cpu_s - used.cpu_s >= 0.08


def test_a_process_whose_name_looks_like_fields() -> None:
    code = "open('/proc/self/comm', 'w').write('a) 1 (2 3'); print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout and process.stdout.readline()
        used = UsageMeter().usage_of(process.pid)
        assert used and 0 <= used.cpu_s < 60 and 1 << 20 < used.resident_bytes < 1 << 30
        process.communicate(b"\n")
    assert UsageMeter().usage_of(process.pid) is None


# It uses a second of CPU time and 64 MiB itself, and shares 64 MiB with its parent. Then it waits.
CHILD = """
import mmap, os, sys, time
shared = mmap.mmap(int(sys.argv[1]), 64 << 20)
shared.write(b"x" * (64 << 20))
own = bytearray(os.urandom(1 << 20) * 64)
while time.process_time() < 1:
    pass
print("ready", flush=True)
sys.stdin.readline()
"""
PARENT = """
import mmap, os, subprocess, sys, threading
file = os.memfd_create("shared")
os.ftruncate(file, 64 << 20)
shared = mmap.mmap(file, 64 << 20)
shared.write(b"x" * (64 << 20))
def run():
    with subprocess.Popen([sys.executable, "-c", sys.argv[1], str(file)], pass_fds=[file]):
        pass
print("alone", flush=True)
sys.stdin.readline()
# Not every child process is the main thread's.
running = threading.Thread(target=run)
running.start()
running.join()
print("ended", flush=True)
sys.stdin.readline()
"""


def test_child_processes_count_while_they_run_and_afterwards() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin and process.stdout

        def used_when(said: bytes) -> Usage:
            assert process.stdin and process.stdout
            assert process.stdout.readline() == said + b"\n"
            found = UsageMeter().usage_of(process.pid)
            assert found
            process.stdin.write(b"\n")
            process.stdin.flush()
            return found

        alone, together, ended = map(used_when, (b"alone", b"ready", b"ended"))
        assert together.cpu_s - alone.cpu_s >= 0.95
        # Python itself takes some of it, and the 64 MiB that both have are counted once.
        assert 64 << 20 <= together.resident_bytes - alone.resident_bytes < 120 << 20
        assert alone.resident_bytes > 64 << 20
        # The CPU time is a counter.
        assert ended.cpu_s >= together.cpu_s
        assert ended.resident_bytes < together.resident_bytes - (60 << 20)


def test_cpu_time_never_falls_while_child_processes_end() -> None:
    code = """
import subprocess, sys
print("ready", flush=True)
for _ in range(5):
    subprocess.run([sys.executable, "-S", "-c", "sum(range(100_000))"])
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline()
        last_s = 0.0
        while process.poll() is None:
            # Each meter forgets what was found before.
            used = UsageMeter().usage_of(process.pid)
            assert used and used.cpu_s >= last_s
            last_s = used.cpu_s


# Its child process uses CPU time, and its child's child more. The latter outlives the former.
ORPHANING = """
import subprocess, sys
grandchild = "import time\\nwhile time.process_time() < 0.3: pass\\nprint(1, flush=True); input()"
child = "import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', sys.argv[1]]); input()"
with subprocess.Popen([sys.executable, "-S", "-c", child, grandchild], stdin=subprocess.PIPE) as running:
    sys.stdin.readline()
    running.kill()
    running.wait()
    print(2, flush=True)
    sys.stdin.readline()
"""


def test_cpu_time_does_not_fall_when_a_child_process_leaves_the_tree() -> None:
    meter = UsageMeter()
    with subprocess.Popen(
        [sys.executable, "-S", "-c", ORPHANING], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin and process.stdout and process.stdout.readline() == b"1\n"
        before = meter.usage_of(process.pid)
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"2\n"
        after, anew = meter.usage_of(process.pid), UsageMeter().usage_of(process.pid)
        assert before and after and anew and anew.cpu_s < before.cpu_s <= after.cpu_s
        process.communicate(b"\n")
    assert meter.usage_of(process.pid) is None
