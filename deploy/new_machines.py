"""Sets up machines that have come in the place of others, at their addresses: deploy/cluster.local.yaml runs it on the
head.

Ray's autoscaler starts Ray again on a machine that it has lost, but copies nothing there and installs nothing. So this
looks for machines on which everything was, and nothing is any more. When they are set up, Ray finds them by itself.

When Ray has ended on the head, this ends it on the other machines, which `ray down` leaves as they are, and ends too.
"""

from __future__ import annotations

import fcntl
import shlex
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

RAY_PORT = 6379
# The seconds between two looks at all machines, and whether Ray is still there.
LOOK_S, POLL_S = 20.0, 5.0
# Ray has ended when it was not there so often in a row.
MAX_AWAY = 2
# This is there when a machine is set up.
LAST_INSTALLED = "~/venv/bin/alignedserve"
# ssh's own exit status, where it does not come to the command.
UNREACHABLE = 255


@dataclass
class Machine:
    ip: str
    config: dict[str, Any]

    def is_set_up(self) -> bool | None:
        """Returns None where the machine can't be reached."""
        done = subprocess.run([*self._ssh(), f"test -x {LAST_INSTALLED}"], capture_output=True)
        return None if done.returncode == UNREACHABLE else done.returncode == 0

    def set_up(self) -> None:
        """As `ray up` does it. Raises CalledProcessError."""
        for there, here in self.config["file_mounts"].items():
            self._copy(Path(here).expanduser(), there)
        for command in self.config["setup_commands"]:
            subprocess.run([*self._ssh(), f"bash --login -c {shlex.quote(command)}"], check=True)

    def stop_ray(self) -> None:
        """Does nothing where the machine can't be reached."""
        subprocess.run([*self._ssh(), "~/venv/bin/ray stop"])

    def _copy(self, here: Path, there: str) -> None:
        parent = there.rpartition("/")[0]
        subprocess.run([*self._ssh(), f"mkdir -p {parent}"], check=True)
        source, target = (f"{here}/", f"{there}/") if here.is_dir() else (str(here), there)
        way = shlex.join(self._ssh()[:-1])
        subprocess.run(["rsync", "-a", "-e", way, source, f"{self._ssh()[-1]}:{target}"], check=True)

    def _ssh(self) -> list[str]:
        auth = self.config["auth"]
        command = ["ssh", "-i", str(Path(auth["ssh_private_key"]).expanduser())]
        for option in ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR"):
            command += ["-o", option]
        return [*command, "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", f"{auth['ssh_user']}@{self.ip}"]


def machines_of(config: dict[str, Any]) -> list[Machine]:
    return [Machine(ip, config) for ip in config["provider"]["worker_ips"]]


def is_ray_there(config: dict[str, Any]) -> bool:
    try:
        socket.create_connection((config["provider"]["head_ip"], RAY_PORT), timeout=5).close()
    except OSError:
        return False
    return True


def look(machines: list[Machine], were_set_up: set[str]) -> None:
    for machine in machines:
        is_set_up = machine.is_set_up()
        if is_set_up:
            were_set_up.add(machine.ip)
        elif is_set_up is False and machine.ip in were_set_up:
            print(f"{machine.ip} is a new machine: setting it up", flush=True)
            try:
                machine.set_up()
            except subprocess.CalledProcessError as error:
                print(f"{machine.ip}: {error}; trying again", flush=True)
            else:
                print(f"{machine.ip} is set up", flush=True)


def main() -> None:
    """The argument is the configuration as `ray up` leaves it on the head, each time that it runs."""
    path = Path(sys.argv[1]).expanduser()
    with Path("~/.new_machines.lock").expanduser().open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # It runs already.
        were_set_up: set[str] = set()
        num_away, looked_s = 0, 0.0
        while num_away < MAX_AWAY:
            config = yaml.safe_load(path.read_text())
            if time.monotonic() - looked_s > LOOK_S:
                look(machines_of(config), were_set_up)
                looked_s = time.monotonic()
            time.sleep(POLL_S)
            num_away = 0 if is_ray_there(config) else num_away + 1
        print("Ray has ended here: ending it on the other machines", flush=True)
        for machine in machines_of(config):
            machine.stop_ray()


if __name__ == "__main__":
    main()
