"""How a process that is not a child has ended."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from alignedserve.launch import exits
from alignedserve.launch.exits import ExitWatch, _num_oom_kills, _oom_counter
from tests.launch.restarting import restart
from tests.launch.server import POOL, serving, until

KERNEL = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])
knows = pytest.mark.skipif(KERNEL < (6, 15), reason="this kernel does not tell the status")
# It does nothing until it gets a line.
WAITING = "import os, sys; sys.stdin.readline(); "


def ended(action: str, signalled: int | None = None) -> str | None:
    """The result for a process that does this."""
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING + action], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    watch = ExitWatch(process.pid)
    if signalled:
        process.send_signal(signalled)
    process.communicate(b"\n")
    try:
        return watch.result()
    finally:
        watch.close()


@knows
def test_the_status_or_signal_of_a_process_that_others_have_waited_for() -> None:
    assert ended("sys.exit(3)") == "exit status 3"
    assert ended("os.abort()") == "signal 6 (SIGABRT)"
    assert ended("", signal.SIGKILL) == "signal 9 (SIGKILL)"


def test_nothing_is_known_of_a_process_that_runs_or_never_was() -> None:
    watch = ExitWatch(os.getpid())
    assert watch.result() is None
    watch.close()
    watch.close()
    assert ExitWatch(2**22 + 1).result() is None


def num_pidfds(pid: int) -> int:
    """How many processes it holds a descriptor of."""
    found = 0
    for each in Path(f"/proc/{pid}/fd").iterdir():
        # It may be closed meanwhile.
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(each) == "anon_inode:[pidfd]"
    return found


def test_the_descriptor_of_a_process_is_closed_with_the_last_that_watches_it() -> None:
    before = num_pidfds(os.getpid())
    watch = ExitWatch(os.getpid())
    result = watch.result
    assert num_pidfds(os.getpid()) == before + 1
    del watch
    assert result() is None and num_pidfds(os.getpid()) == before + 1
    del result
    assert num_pidfds(os.getpid()) == before


@pytest.fixture
def counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the number of kills in a cgroup that all processes share."""
    file = tmp_path / "memory.events"
    file.write_text("oom_kill 2\n")
    monkeypatch.setattr(exits, "_oom_counter", lambda pid, root: file)
    return file


@contextmanager
def watched() -> Iterator[tuple[subprocess.Popen[bytes], ExitWatch]]:
    """A process that waits for its end."""
    process = subprocess.Popen([sys.executable, "-c", WAITING], stdin=subprocess.PIPE)
    watch = ExitWatch(process.pid)
    try:
        yield process, watch
    finally:
        process.kill()
        process.communicate()
        watch.close()


def end(process: subprocess.Popen[bytes], number: signal.Signals = signal.SIGKILL) -> None:
    """The kernel tells the status once it has been waited for."""
    process.send_signal(number)
    process.wait()


@knows
def test_a_kill_for_lack_of_memory_explains_one_death(counter: Path) -> None:
    """Under systemd, all processes are in one cgroup."""
    with watched() as (router, of_router), watched() as (decode, of_decode), watched() as (pool, of_pool):
        counter.write_text("oom_kill 3\n")
        end(router)
        assert of_router.result() == "signal 9 (SIGKILL), perhaps out of memory"
        end(decode)
        assert of_decode.result() == "signal 9 (SIGKILL)"
        # The next kill is of something else, and its successor is not blamed on it either.
        counter.write_text("oom_kill 4\n")
        end(pool, signal.SIGTERM)
        assert of_pool.result() == "signal 15 (SIGTERM)"
        with watched() as (successor, of_successor):
            end(successor)
            assert of_successor.result() == "signal 9 (SIGKILL)"


@knows
def test_two_kills_for_lack_of_memory_explain_two_deaths(counter: Path) -> None:
    with watched() as (router, of_router), watched() as (decode, of_decode):
        counter.write_text("oom_kill 4\n")
        end(router)
        end(decode)
        assert of_router.result() == of_decode.result() == "signal 9 (SIGKILL), perhaps out of memory"


def test_a_process_that_runs_did_not_run_out_of_memory(
    counter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exits, "_WAIT_MS", 0)
    with watched() as (_, watch):
        counter.write_text("oom_kill 3\n")
        assert watch.result() is None


def test_on_older_kernels_a_kill_for_lack_of_memory_may_be_the_cause(
    counter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exits, "_status", lambda descriptor: None)
    with watched() as (router, of_router), watched() as (decode, of_decode):
        counter.write_text("oom_kill 3\n")
        end(router)
        assert of_router.result() == "perhaps out of memory"
        end(decode)
        assert of_decode.result() is None


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A cgroup in which 64 MiB are too many."""
    for parent, limit in (("memory", "memory.limit_in_bytes"), ("", "memory.max")):
        path = Path("/sys/fs/cgroup", parent, f"alignedserve-test-{os.getpid()}")
        try:
            path.mkdir()
            (path / limit).write_text(str(32 << 20))
        except OSError:
            if path.is_dir():
                path.rmdir()
            continue
        yield path
        path.rmdir()
        return
    pytest.skip("no cgroup can be made here")


@knows
def test_a_process_that_the_kernel_kills_for_memory(small_cgroup: Path) -> None:
    # It enters the cgroup before it is watched, as a container's processes do.
    process = subprocess.Popen([sys.executable, "-c", WAITING + "bytearray(64 << 20)"], stdin=subprocess.PIPE)
    (small_cgroup / "cgroup.procs").write_text(str(process.pid))
    watch = ExitWatch(process.pid)
    process.communicate(b"\n")
    assert process.returncode == -signal.SIGKILL
    assert watch.result() == "signal 9 (SIGKILL), perhaps out of memory"
    watch.close()


@pytest.mark.parametrize(
    ("own", "file"),
    [
        ("4:memory:/pod/x\n0::/\n", "memory/pod/x/memory.oom_control"),
        ("0::/system.slice/x.service\n", "system.slice/x.service/memory.events"),
    ],
)
def test_both_versions_of_cgroups_are_read(
    own: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = tmp_path / file
    counter.parent.mkdir(parents=True)
    counter.write_text("low 0\noom 3\noom_kill 2\noom_group_kill 5\n")
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path: own if path.name == "cgroup" else read(path))
    assert _oom_counter(1, tmp_path) == counter and _num_oom_kills(counter) == 2
    counter.unlink()
    assert _oom_counter(1, tmp_path) == Path("/proc/vmstat")


@pytest.mark.slow
def test_no_descriptors_of_processes_are_left_by_a_restart() -> None:
    with serving(*POOL) as server:
        server.until_whole()
        before = num_pidfds(server.launcher_pid)
        assert before >= len(server.processes())
        restart(server)
        server.until_whole()
        # Also not of the gateway that was replaced, which ends a little later.
        until(
            lambda: num_pidfds(server.launcher_pid) <= before,
            lambda: f"{before}, {num_pidfds(server.launcher_pid)}",
        )


@knows
@pytest.mark.slow
def test_a_death_is_printed_with_its_signal() -> None:
    with serving(*POOL) as server:
        os.kill(server.pid_of("decode-0"), signal.SIGSEGV)
        server.until_said(r"^decode-0: its process died: signal 11 \(SIGSEGV\)$")
        os.kill(server.pid_of("router"), signal.SIGKILL)
        server.until_said(r"^router: its process died: signal 9 \(SIGKILL\)$")
        server.until_whole()
