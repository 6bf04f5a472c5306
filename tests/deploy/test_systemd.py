"""deploy/systemd: systemd knows what is in the unit, and `serve` its options."""

from __future__ import annotations

import grp
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from alignedserve.cli.serve import command
from alignedserve.launch.control import control_path

FOLDER = Path(__file__).parents[2] / "deploy/systemd"
UNIT = FOLDER / "alignedserve.service"


def values(name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", UNIT.read_text(), re.MULTILINE)


def words(**environment: str) -> list[str]:
    """The command, with variables as systemd puts them in: split into words, and none if empty."""
    [line] = values("ExecStart")
    found = []
    for word in line.split():
        found += environment[word[1:]].split() if word.startswith("$") else [word]
    return found


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_systemd_knows_all_of_it(tmp_path: Path) -> None:
    # the program is elsewhere here
    here = UNIT.read_text().replace("/opt/alignedserve/bin/alignedserve", sys.executable)
    copy = tmp_path / UNIT.name
    copy.write_text(here)
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True)
    about_it = [line for line in done.stderr.splitlines() if UNIT.stem in line]
    assert done.returncode == 0 and not about_it, done.stderr


def test_the_options_are_those_of_serve() -> None:
    named = set(re.findall(r"^(\w+)=", (FOLDER / "alignedserve.env").read_text(), re.MULTILINE))
    assert named == {"MODEL", "OPTIONS"}
    program, name, *rest = words(MODEL="", OPTIONS="")
    assert program.endswith("/alignedserve") and name == "serve"
    options = command.make_context("serve", rest).params
    assert options["model"] is None and options["log_format"] == "json"
    given = command.make_context("serve", words(MODEL="a/b", OPTIONS="--port 9 --gateways 2")[2:]).params
    assert (given["model"], given["port"], given["gateways"]) == ("a/b", 9, 2)
    # where it may write
    [directory] = values("StateDirectory")
    assert options["state_dir"].startswith(f"/var/lib/{directory}/")


def test_it_has_time_to_drain_and_its_socket_is_found_from_outside() -> None:
    options = command.make_context("serve", []).params
    assert int(values("TimeoutStopSec")[0]) > options["shutdown_timeout"] + 15
    assert values("KillMode") == ["mixed"]
    assert control_path("127.0.0.1", 8000).startswith("/tmp/")
    assert values("ReadWritePaths") == ["/tmp"] and not values("PrivateTmp")


def test_gpus_are_there_before_it_starts_and_are_not_hidden() -> None:
    """Nodes are made as root (+), and a host without GPUs lacks the programs (-)."""
    assert [line.split()[0] for line in values("ExecStartPre")] == [
        "-+/usr/bin/nvidia-smi",
        "-+/usr/bin/nvidia-modprobe",
    ]
    assert not values("PrivateDevices") and not values("DevicePolicy") and not values("DeviceAllow")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to a group")
@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl here")
def test_a_file_of_keys_that_root_replaces_can_be_read_by_the_service(tmp_path: Path) -> None:
    """By its group. Another group and directory stand for those of the service."""
    group = next(each for each in grp.getgrall() if each.gr_gid != os.getegid())
    steps = UNIT.read_text().split("useradd", 1)[1].split("#   cp ", 1)[0].splitlines()[1:]
    commands = [
        step.removeprefix("#").replace("-g alignedserve", f"-g {group.gr_gid}").replace("/etc", str(tmp_path))
        for step in steps
        if step.removeprefix("#").strip()
    ]
    assert commands[0].split()[0] == "install" and commands[-1].split()[0] == "mv"
    keys = tmp_path / "alignedserve/api_keys"

    def run(commands: list[str]) -> tuple[int, int]:
        """The inode of the file, and the number of its keys."""
        subprocess.run(["sh", "-euc", "\n".join(commands)], cwd=tmp_path, check=True)
        found = keys.stat()
        assert (found.st_gid, found.st_mode & 0o777) == (group.gr_gid, 0o640)
        return found.st_ino, len(keys.read_text().splitlines())

    first, num_keys = run(commands)
    assert num_keys == 1
    second, _ = run(commands[1:])
    assert first != second
    # What an administrator creates in it without thinking of the group can be read as well.
    other = tmp_path / "alignedserve/other"
    subprocess.run(["sh", "-c", f"umask 027; echo key > {other}"], check=True)
    assert (other.stat().st_gid, other.stat().st_mode & 0o777) == (group.gr_gid, 0o640)
