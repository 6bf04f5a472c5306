"""A run's results: one JSON file, rewritten after every case because the process may be killed at any time."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

Row = dict[str, Any]

ROOT = Path(__file__).parent.parent.parent


@dataclass
class Record:
    path: Path
    machine: dict[str, Any]
    # Part, case, seconds it took; then its results, or `error`.
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        # Each row gets its own line, because rows are long and read one by one.
        head = json.dumps(self.machine, indent=1, default=_plain)[:-2]
        rows = ",\n".join(json.dumps(row, default=_plain) for row in self.rows)
        text = f'{head},\n "rows": [\n{rows}\n]\n}}\n'
        unfinished = self.path.with_suffix(".part")
        unfinished.write_text(text)
        os.replace(unfinished, self.path)

    def table(self) -> str:
        lines = [f"{row['part']:<11} {row['case']:<44} {summary(row)}" for row in self.rows]
        return "\n".join(lines)


def summary(row: Row) -> str:
    if "error" in row:
        return "FAILED " + str(row["error"]).strip().rpartition("\n")[2][:160]
    return str(row.get("summary", ""))


def is_measured(row: Row) -> bool:
    return "error" not in row and not row.get("skipped")


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} in the results: {value!r}")


def describe_machine(device: torch.device, module: str = "benchmarks.gpu.run") -> dict[str, Any]:
    described: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        # The environment has it if the tree is not a git checkout.
        "commit": os.environ.get("ALIGNEDSERVE_COMMIT")
        or _output("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "changed_files": _output("git", "-C", str(ROOT), "status", "--short"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "num_cpus": os.cpu_count(),
        "device": _cpu_name() if device.type == "cpu" else torch.cuda.get_device_name(device),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        described |= {
            "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "cuda": torch.version.cuda,
            "num_multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
        }
    return described


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _output(*command: str) -> str | None:
    """Returns None if there is no such program or it fails: a copy of the tree need not be a git checkout."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
