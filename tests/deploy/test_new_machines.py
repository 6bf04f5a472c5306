"""deploy/new_machines.py as it runs on the head, with an `ssh` and an `rsync` that find each machine in a folder."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

SCRIPT = Path(__file__).parents[2] / "deploy/new_machines.py"
# ssh is called with options, the machine, and a command; a machine is there if its folder is.
SSH = """\
#!/bin/bash
for command; do host=$before; before=$command; done
cd "$MACHINES/${host#somebody@}" 2> /dev/null || exit 255
echo "${host#somebody@} $command" >> "$MACHINES/said"
HOME=$PWD exec bash -c "$command"
"""
RSYNC = """\
#!/bin/bash
for target; do source=$before; before=$target; done
target=${target#somebody@}
cp -r "$source." "$MACHINES/${target%%:*}/alignedserve"
"""


class Head:
    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.machines = folder, folder / "machines"
        for name, text in (("ssh", SSH), ("rsync", RSYNC)):
            (folder / "bin").mkdir(exist_ok=True)
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)
        (folder / "source").mkdir()
        (folder / "source/file").write_text("of ours")
        self.config = folder / "config.yaml"
        config = {
            "provider": {"head_ip": "127.0.0.1", "worker_ips": ["one", "two"]},
            "auth": {"ssh_user": "somebody", "ssh_private_key": "key"},
            "file_mounts": {"~/alignedserve": f"{folder}/source"},
            "setup_commands": [
                "mkdir -p ~/venv/bin && cp ~/alignedserve/file ~/venv/bin/alignedserve",
                "chmod +x ~/venv/bin/alignedserve",
            ],
        }
        self.config.write_text(yaml.safe_dump(config))
        # Not twenty seconds, nor Ray's port.
        text = SCRIPT.read_text()
        for before, after in (
            ("RAY_PORT = 6379", f"RAY_PORT = {port}"),
            ("LOOK_S, POLL_S = 20.0, 5.0", "LOOK_S, POLL_S = 0.0, 0.05"),
        ):
            assert before in text
            text = text.replace(before, after)
        self.script = folder / "new_machines.py"
        self.script.write_text(text)

    def add(self, name: str) -> None:
        (self.machines / name).mkdir(parents=True)

    def start(self) -> subprocess.Popen[str]:
        env = os.environ | {
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
            "MACHINES": str(self.machines),
            "HOME": str(self.folder),
        }
        return subprocess.Popen(
            [sys.executable, str(self.script), str(self.config)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
        )

    def num_said(self, machine: str, command: str) -> int:
        path = self.machines / "said"
        lines = path.read_text().splitlines() if path.exists() else []
        return sum(line.startswith(f"{machine} ") and command in line for line in lines)

    def until_seen(self, machine: str) -> None:
        """When it is looked at again, what was found before is known."""
        while self.num_said(machine, "test -x") < 2:
            time.sleep(0.01)


@contextmanager
def running(head: Head) -> Iterator[subprocess.Popen[str]]:
    process = head.start()
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def ray() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=1000) as found:
        yield found


@pytest.fixture
def head(tmp_path: Path, ray: socket.socket) -> Head:
    return Head(tmp_path, ray.getsockname()[1])


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().rstrip()


def test_a_machine_in_the_place_of_another_is_set_up_until_ray_ends(head: Head, ray: socket.socket) -> None:
    for name in ("one", "two"):
        head.add(name)
    # `two` is one that Ray is setting up for the first time: nobody else does that.
    (head.machines / "one/venv/bin").mkdir(parents=True)
    installed = head.machines / "one/venv/bin/alignedserve"
    installed.write_text("")
    installed.chmod(0o755)
    with running(head) as process:
        for name in ("one", "two"):
            head.until_seen(name)
        shutil.rmtree(head.machines / "one")
        # It is off for a while.
        head.add("one")
        assert line(process) == "one is a new machine: setting it up"
        assert line(process) == "one is set up"
        assert installed.read_text() == "of ours" and os.access(installed, os.X_OK)
        assert not (head.machines / "two/venv").exists()
        # A second one leaves it to the first.
        with running(head) as second:
            assert second.wait(60) == 0
        ray.close()
        assert line(process) == "Ray has ended here: ending it on the other machines"
        assert process.wait(60) == 0
    assert [head.num_said(name, "~/venv/bin/ray stop") for name in ("one", "two")] == [1, 1]


def test_what_fails_is_tried_again(head: Head) -> None:
    head.add("one")
    (head.machines / "one/venv/bin").mkdir(parents=True)
    installed = head.machines / "one/venv/bin/alignedserve"
    installed.write_text("")
    installed.chmod(0o755)
    source = head.folder / "source/file"
    text = source.read_text()
    with running(head) as process:
        head.until_seen("one")
        source.unlink()
        shutil.rmtree(head.machines / "one/venv")
        assert line(process) == "one is a new machine: setting it up"
        while not (said := line(process)).endswith("trying again"):
            pass
        assert said.startswith("one: ")
        source.write_text(text)
        while line(process) != "one is set up":
            pass
    assert installed.read_text() == text
