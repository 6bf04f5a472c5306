from __future__ import annotations

import io
import os
import subprocess
import sys
import threading

from alignedserve.process.whole_lines import WholeLines


def in_a_thread(function: object, *arguments: object) -> None:
    thread = threading.Thread(target=function, args=arguments)  # type: ignore[arg-type]
    thread.start()
    thread.join()


def test_what_another_thread_does_comes_before_or_after_a_line() -> None:
    under = io.StringIO()
    lines = WholeLines(under)
    lines.write("one")
    in_a_thread(lines.flush)
    in_a_thread(lines.write, "another\nand ")
    assert under.getvalue() == "another\n"
    lines.write(" line\nmore")
    assert under.getvalue() == "another\none line\n"
    lines.flush()
    assert under.getvalue() == "another\none line\nmore"


def test_it_is_a_stream_like_any_other() -> None:
    with os.fdopen(os.dup(2), "w", encoding="utf-8") as stream:
        lines = WholeLines(stream)
        assert lines.fileno() == stream.fileno() and lines.encoding == "utf-8" and not lines.closed
        assert lines.write("") == 0


PROGRAM = """
import sys, threading
import click
from alignedserve.process.whole_lines import write_whole_lines
sys.setswitchinterval(1e-6)
write_whole_lines()
write_whole_lines()
is_over = threading.Event()
def flush():
    while not is_over.is_set():
        sys.stdout.flush()
        sys.stderr.flush()
def show(stream, name):
    for number in range(300):
        print(name, number, file=stream)
threads = [threading.Thread(target=show, args=(stream, f"thread{number}"))
           for number in range(2) for stream in (sys.stdout, sys.stderr)]
flushing = threading.Thread(target=flush)
for each in (flushing, *threads):
    each.start()
for number in range(300):
    click.echo(f"echo {number}")
for each in threads:
    each.join()
is_over.set()
flushing.join()
"""


def test_two_streams_of_a_process_and_many_threads_are_one_file_of_lines() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    found = sorted(done.stdout.splitlines())
    expected = [f"{name} {number}" for name in ("echo", *["thread0", "thread1"] * 2) for number in range(300)]
    assert found == sorted(expected)
