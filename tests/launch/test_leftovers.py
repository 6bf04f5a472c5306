"""Nothing is left, however a process ends."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from alignedserve.launch.leftovers import descendants, end, removing
from alignedserve.launch.ports import FIRST, LAST, bound, check_address, claimed, free_port, is_free
from tests.process.test_private_files import is_locked

HOLD = """
import subprocess, sys, time
from pathlib import Path
from alignedserve.launch.leftovers import removing
with removing(sys.argv[1]) as left, subprocess.Popen(["sleep", "61"]) as child:
    left.note_processes()
    (left.directory / "deep").mkdir()
    (left.directory / "deep" / "file").touch()
    Path("/dev/shm/" + sys.argv[1] + "-x").touch()
    print(left.directory, child.pid, flush=True)
    time.sleep(60)
"""


def until_gone(*paths: Path) -> None:
    deadline = time.monotonic() + 40
    while any(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"{paths} are still there"
        time.sleep(0.02)


def test_directory_and_memory_go_with_the_block() -> None:
    prefix = f"test-{secrets.token_hex(6)}"
    segment = Path(f"/dev/shm/{prefix}-1")
    with pytest.raises(RuntimeError), removing(prefix) as left:
        assert is_locked(left.directory), "it would be cleaned away while the system runs"
        (left.directory / "file").touch()
        segment.touch()
        raise RuntimeError
    assert not left.directory.exists() and not segment.exists()


def test_they_and_its_children_go_with_a_process_that_is_killed() -> None:
    prefix = f"test-{secrets.token_hex(6)}"
    command = [sys.executable, "-c", HOLD, prefix]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        directory, child = process.stdout.readline().split()
        assert (Path(directory) / "deep" / "file").exists()
        process.kill()
    until_gone(Path(directory), Path(f"/dev/shm/{prefix}-x"), Path(f"/proc/{child}"))


def test_children_of_children_are_found_and_ended() -> None:
    shell = "sleep 60 & echo ready; wait"
    others = set(descendants(os.getpid()))
    with subprocess.Popen(["sh", "-c", shell], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "ready\n"
        found = set(descendants(os.getpid())) - others
        assert len(found) == 2
        for pid, _ in found:
            os.kill(pid, 15)
        process.wait()
        end(found)
        assert not found & set(descendants(os.getpid()))


def test_a_process_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignedserve.launch.leftovers._END_S", 0.1)
    with subprocess.Popen(["sleep", "60"]) as process:
        end({each for each in descendants(os.getpid()) if each[0] == process.pid})
        assert process.wait() == -9


def test_ports_are_free_ones_that_no_outgoing_connection_gets() -> None:
    port = free_port("127.0.0.1")
    assert FIRST <= port <= LAST
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert lowest > LAST
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert not is_free("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(OSError, match="Cannot assign requested address"):
        is_free("192.0.2.1", 80)


def test_an_address_is_claimed_by_one_server() -> None:
    port = free_port("127.0.0.1")
    with claimed("127.0.0.1", port):
        check_address("127.0.0.1", port)
        line = f"^port={port}: another server is starting or stopping on it at 127.0.0.1$"
        with pytest.raises(ValueError, match=line), claimed("127.0.0.1", port):
            pass
        with claimed("127.0.0.2", port):
            pass
    with claimed("127.0.0.1", port):
        pass


def test_a_claim_fits_and_is_not_one_that_others_make(monkeypatch: pytest.MonkeyPatch) -> None:
    # longer than a socket's name may be
    host = 200 * "a"
    with claimed(host, 1), claimed(host, 2):
        with pytest.raises(ValueError, match="^port=1: another server"), claimed(host, 1):
            pass
        monkeypatch.setattr(os, "geteuid", lambda: 4321)
        with claimed(host, 1):
            pass
    # Anyone can guess the address.
    with socket.socket(socket.AF_UNIX) as squatter:
        squatter.bind("\0alignedserve-serve:127.0.0.1:1")
        with claimed("127.0.0.1", 1):
            pass


def test_where_nobody_can_listen_is_said_in_a_line() -> None:
    check_address("127.0.0.1", free_port("127.0.0.1"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port={port}: another program listens on it at 127.0.0.1"):
            check_address("127.0.0.1", port)
    for host, reason in (("192.0.2.1", "Cannot assign requested address"), ("no.such.host.", "not known")):
        with pytest.raises(ValueError, match=f"host='{host}', port=80: .*{reason}"):
            check_address(host, 80)
    with pytest.raises(ValueError, match="^port=80: 192.0.2.1:80: Cannot assign requested address$"):
        bound("192.0.2.1", 80)
