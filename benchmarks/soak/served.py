"""The measured server: `alignedserve serve` with the demo model, started as by a user."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from alignedserve.launch.ports import free_port
from benchmarks.rt_with_be.served import running
from benchmarks.soak.faults import GRACE_S

HOST = "127.0.0.1"
START_S = 240.0
COMMON_ROLES = ("router", "kvpool", "gateway", "store")


@dataclass(frozen=True)
class Setup:
    seconds: float
    seed: int
    num_prefill: int = 1
    num_decode: int = 2
    # Colocated instances, in place of those.
    num_colocated: int = 0
    num_chats: int = 6
    # Further options of `serve`.
    extra: tuple[str, ...] = ()
    # Seconds after a recovery in which an error is excused.
    grace_s: float = GRACE_S

    @property
    def roles(self) -> tuple[str, ...]:
        return COMMON_ROLES + (("colocated",) if self.num_colocated else ("prefill", "decode"))

    @property
    def instance_ids(self) -> list[str]:
        counts = {"prefill": self.num_prefill, "decode": self.num_decode}
        if self.num_colocated:
            counts = {"colocated": self.num_colocated}
        numbered = [f"{role}-{number}" for role, count in counts.items() for number in range(count)]
        return ["router", "kvpool-0", "gateway-0", *numbered]

    @property
    def options(self) -> list[str]:
        if self.num_colocated:
            return ["--colocated-instances", str(self.num_colocated)]
        return ["--prefill-instances", str(self.num_prefill), "--decode-instances", str(self.num_decode)]


@dataclass(frozen=True)
class Served:
    process: subprocess.Popen[bytes]
    url: str
    log: Path


@contextmanager
def serving(setup: Setup) -> Iterator[Served]:
    port = free_port(HOST)
    # A socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="soak-", dir="/tmp", ignore_cleanup_errors=True) as name:
        own = ["--host", HOST, "--port", str(port), "--shutdown-timeout", "5", "--log-level", "warning"]
        own += ["--state-dir", f"{name}/state", "--cost-profile", f"{name}/profile"]
        command = [
            sys.executable,
            "-m",
            "alignedserve",
            "serve",
            "--dtype",
            "float32",
            *own,
            *setup.options,
            *setup.extra,
        ]
        log = Path(name) / "log"
        with running(command, log, "ready after", START_S) as process:
            yield Served(process, f"http://{HOST}:{port}", log)
