"""Hosts on this machine. Each has its own network, processes, home, /dev/shm, Ray directory and sshd.

They are network namespaces on their own bridge, and can only reach each other. Making them requires root, and a kernel
that permits it. `why_not` tells what is missing.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NEEDED = ("ip", "unshare", "nsenter", "ssh", "ssh-keygen", "rsync")
SSHD = "/usr/sbin/sshd"
# The last number of the address of the user that runs `ray up`.
USER = 100


def why_not() -> str | None:
    """Returns why hosts can't be made here; None if they can."""
    if os.geteuid():
        return "hosts take root"
    missing = [name for name in NEEDED if shutil.which(name) is None]
    missing += [] if Path(SSHD).exists() else ["sshd"]
    if missing:
        return f"{', '.join(missing)} is not installed"
    name = f"as-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespaces here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


@dataclass
class Host:
    number: int
    net: Net
    home: Path
    init: subprocess.Popen[bytes]

    @property
    def ip(self) -> str:
        return self.net.ip(self.number)

    def run(self, command: str, check: bool = True, timeout_s: float = 120.0) -> str:
        """Runs the command here, as a logged-in user would."""
        return self.net.ssh(self.ip, command, check, timeout_s)

    def pids(self) -> list[int]:
        """Returns all processes except the first one and sshd."""
        found = subprocess.run(
            self._inside("ps", "-eo", "pid=,comm="), capture_output=True, text=True, check=True
        )
        pairs = [line.split(None, 1) for line in found.stdout.splitlines()]
        return [int(pid) for pid, name in pairs if int(pid) != 1 and name not in ("sshd", "ps")]

    def kill_all(self) -> None:
        """Kills everything that runs here with kill -9, including sshd, which is restarted."""
        subprocess.run(self._inside("sh", "-c", "kill -9 -1"), check=False)

    def cut(self) -> None:
        subprocess.run(["ip", "link", "set", self.net.link(self.number), "down"], check=True)

    def mend(self) -> None:
        subprocess.run(["ip", "link", "set", self.net.link(self.number), "up"], check=True)

    def destroy(self) -> None:
        """Kills its first process, and with it all others, as if it were switched off."""
        os.kill(self._first_pid(), signal.SIGKILL)
        self.init.wait()
        self.net.forget(self)

    def popen(self, command: list[str], cwd: Path, **options: Any) -> subprocess.Popen[str]:
        """Starts a command of this test on the host."""
        # A process that enters another host's file system starts in its root.
        there = ["sh", "-c", 'cd "$0" && exec "$@"', str(cwd), *command]
        return subprocess.Popen(self._inside(*there), text=True, **options)

    def _inside(self, *command: str) -> list[str]:
        return ["nsenter", "-t", str(self._first_pid()), "-m", "-n", "-p", "-u", *command]

    def _first_pid(self) -> int:
        """Returns the first process of the host's process namespace, by its id on this machine."""
        children = Path(f"/proc/{self.init.pid}/task/{self.init.pid}/children").read_text().split()
        return int(children[0])


@dataclass
class Net:
    directory: Path
    prefix: str
    # Environment variables of all users that log in.
    env: Mapping[str, str]
    hosts: dict[int, Host] = field(default_factory=dict)

    @property
    def key(self) -> Path:
        return self.directory / "key"

    def ip(self, number: int) -> str:
        return f"10.213.77.{number}"

    def link(self, number: int) -> str:
        return f"{self.prefix}-{number}"

    def add(self, number: int) -> Host:
        """Adds an empty host."""
        space, link, home = f"{self.prefix}-{number}", self.link(number), self.directory / f"home-{number}"
        shutil.rmtree(home, ignore_errors=True)
        for each in ("ray", "home"):
            (home / each).mkdir(parents=True)
        _run("ip", "netns", "add", space)
        # Another machine in the place of one that is gone has the same hardware address. Otherwise, others would send
        # to the old one until their ARP entries have expired, which can take a minute.
        eth0 = ("name", "eth0", "address", f"02:00:0a:d5:4d:{number:02x}", "netns", space)
        _run("ip", "link", "add", link, "type", "veth", "peer", *eth0)
        _run("ip", "link", "set", link, "master", self.prefix, "up")
        _run("ip", "-n", space, "addr", "add", f"{self.ip(number)}/24", "dev", "eth0")
        for each in ("lo", "eth0"):
            _run("ip", "-n", space, "link", "set", each, "up")
        for each in (".profile", ".bashrc"):
            # The last files that login shells read.
            (home / "home" / each).write_text(
                "".join(f"export {name}={shlex.quote(value)}\n" for name, value in self.env.items())
            )
        # It leads nowhere. Ray assumes that the host's own address is the one that would be used to reach the Internet.
        _run("ip", "-n", space, "route", "add", "default", "via", self.ip(254))
        passwd = home / "passwd"
        passwd.write_text(_with_home(Path("/etc/passwd").read_text(), home / "home"))
        script = home / "init"
        script.write_text(
            _INIT.format(home=home, sshd=SSHD, config=self._sshd_config(number, home), name=space)
        )
        command = ["ip", "netns", "exec", space]
        command += [
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "--uts",
            "bash",
            str(script),
        ]
        log = (home / "log").open("wb")
        init = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        host = self.hosts[number] = Host(number, self, home / "home", init)
        self._until_there(host)
        return host

    def ssh(self, ip: str, command: str, check: bool, timeout_s: float) -> str:
        options = [
            "-i",
            str(self.key),
            "-o",
            "StrictHostKeyChecking=no",
            "-o",
            "UserKnownHostsFile=/dev/null",
        ]
        options += ["-o", "LogLevel=ERROR", "-o", "ConnectTimeout=5"]
        found = subprocess.run(
            ["ip", "netns", "exec", f"{self.prefix}-{USER}", "ssh", *options, f"root@{ip}", command],
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        if check and found.returncode:
            raise AssertionError(f"{command}: {found.returncode}\n{found.stdout}{found.stderr}")
        return found.stdout

    def forget(self, host: Host) -> None:
        del self.hosts[host.number]
        # Deleted now, because a namespace exists until its last process has ended.
        _run("ip", "link", "del", self.link(host.number))
        _run("ip", "netns", "del", f"{self.prefix}-{host.number}")

    def _until_there(self, host: Host) -> None:
        deadline = time.monotonic() + 30
        while host.number != USER and self.ssh(host.ip, "echo there", False, 30).strip() != "there":
            assert time.monotonic() < deadline, (host.home.parent / "log").read_text()
            time.sleep(0.1)

    def _sshd_config(self, number: int, home: Path) -> Path:
        config = home / "sshd_config"
        env = " ".join(f"{name}={shlex.quote(value)}" for name, value in self.env.items())
        lines = [
            f"ListenAddress {self.ip(number)}",
            f"HostKey {self.directory / 'host_key'}",
            f"AuthorizedKeysFile {self.key}.pub",
            f"PidFile {home / 'sshd.pid'}",
            "StrictModes no",
            "UsePAM no",
            "PermitRootLogin yes",
            "PasswordAuthentication no",
            "MaxStartups 100",
            "Subsystem sftp internal-sftp",
            f"SetEnv {env}",
        ]
        config.write_text("\n".join(lines) + "\n")
        return config


# The first process adopts orphans, and restarts sshd when it has been killed.
_INIT = """\
hostname {name}
mkdir -p /run/sshd /tmp/ray
mount --bind {home}/passwd /etc/passwd
mount --bind {home}/ray /tmp/ray
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
while true; do
  {sshd} -D -e -f {config} &
  wait $!
done
"""


@contextlib.contextmanager
def network(env: Mapping[str, str]) -> Iterator[Net]:
    """A bridge with no hosts except the user's, who logs in to the others."""
    prefix = f"as{os.getpid() % 100_000}"
    # Not below /tmp/ray, which each host has its own version of. The paths of sockets must be short.
    with tempfile.TemporaryDirectory(prefix="hosts-", dir="/var/tmp") as found:
        net = Net(Path(found), prefix, env)
        for name in ("key", "host_key"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(net.directory / name))
        _run("ip", "link", "add", prefix, "type", "bridge")
        try:
            _run("ip", "link", "set", prefix, "up")
            net.add(USER)
            yield net
        finally:
            for host in list(net.hosts.values()):
                host.destroy()
            _run("ip", "link", "del", prefix)


def packages_of_this_environment() -> dict[str, str]:
    """Returns what makes `pip install` on a host find this environment's packages, in place of an index."""
    return {
        "PYTHONPATH": ":".join(path for path in sys.path if path.endswith("site-packages")),
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
        "PATH": f"{sys.base_prefix}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    }


def _with_home(passwd: str, home: Path) -> str:
    lines = [line.split(":") for line in passwd.splitlines()]
    for fields in lines:
        if fields[0] == "root":
            fields[5], fields[6] = str(home), "/bin/bash"
    return "\n".join(":".join(fields) for fields in lines) + "\n"


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
