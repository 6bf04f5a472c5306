from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import pytest

from alignedserve.process import private_files
from alignedserve.process.private_files import can_others_write, kept


def test_others_can_write_where_they_have_the_right_and_a_way() -> None:
    # where everyone gets to, which pytest's own directories are not
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        outer, inner = Path(name), Path(name) / "inner"
        inner.mkdir()
        for inner_mode, outer_mode, expected in (
            (0o777, 0o755, True),
            (0o777, 0o700, False),
            (0o755, 0o755, False),
            (0o1777, 0o711, True),
        ):
            inner.chmod(inner_mode)
            outer.chmod(outer_mode)
            assert can_others_write(inner) is expected


def is_locked(directory: Path) -> bool:
    """As systemd-tmpfiles finds out."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def test_a_kept_directory_is_locked_and_several_may_keep_it(tmp_path: Path) -> None:
    with kept(tmp_path):
        with kept(tmp_path):
            assert is_locked(tmp_path)
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)


def test_a_cleaners_lock_is_waited_for(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    cleaning = threading.Timer(0.1, os.close, [descriptor])
    cleaning.start()
    with kept(tmp_path):
        cleaning.join()
        assert is_locked(tmp_path)


def test_a_lock_that_stays_is_not_waited_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_files, "_MAX_WAIT_S", 0.05)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with kept(tmp_path):
        os.close(descriptor)
        assert not is_locked(tmp_path)


@pytest.mark.skipif(shutil.which("systemd-tmpfiles") is None, reason="there is no systemd here")
def test_what_is_old_in_a_kept_directory_is_not_cleaned(tmp_path: Path) -> None:
    """Nor is a socket anywhere at which a process listens: that of a launcher is one."""
    place = tmp_path / "tmp"
    held, other, third = (place / secrets.token_hex(4) for _ in range(3))
    for each in (held, other):
        (each / "deep").mkdir(parents=True)
        (each / "deep" / "file").touch()
    third.mkdir()
    rules = tmp_path / "rules.conf"
    rules.write_text(f"d {place} 0755 - - 1us\n")

    def clean() -> None:
        subprocess.run(["systemd-tmpfiles", "--clean", str(rules)], check=True)

    with kept(held), socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(third / "s"))
        listening.listen()
        deadline_s = time.monotonic() + 60
        while other.exists():
            clean()
            assert time.monotonic() < deadline_s
        assert (held / "deep" / "file").exists() and (third / "s").exists()
    while held.exists():
        clean()
        assert time.monotonic() < deadline_s
