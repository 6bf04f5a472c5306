"""Runs each kernel's test against its reference on the GPU. Each file gets a row with the names of the failed tests."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.record import Record, Row, describe_machine

TESTS = (
    "tests/kernels/triton",
    "tests/transport/test_gpu.py",
    "tests/ops/test_cuda_model.py",
    "tests/ops/test_cuda_linear.py",
    "tests/ops/test_triton_inputs.py",
)
# One compiles for Hopper without a GPU; neither needs this GPU.
LEFT_OUT = ("tests/kernels/triton/test_offline.py", "tests/kernels/triton/test_interpreter.py")
TINY_TESTS = ("tests/kernels/triton/test_gated_mul.py",)
MAX_WORKERS = 16


@dataclass
class File:
    # Seconds of all its tests, including setup.
    took_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    # The name of each failed test, and the last line of its message.
    failed: list[tuple[str, str]] = field(default_factory=list)

    def row(self, case: str) -> Row:
        said = ", ".join(f"{count} {what}" for what, count in sorted(self.counts.items()))
        # Workers report in the order in which they end.
        failed = sorted(self.failed)
        names = "; ".join(f"{name}: {why}" for name, why in failed[:3])
        return {
            "part": "kernels",
            "case": case,
            "took_s": round(self.took_s, 2),
            **{f"num_{what}": count for what, count in self.counts.items()},
            "failures": failed,
            "summary": said + (f" FAILED {names}" if names else ""),
        }


class Listener:
    """A pytest plugin that records the tests' outcomes."""

    def __init__(self, record: Record) -> None:
        self._files: dict[str, File] = defaultdict(File)
        self._record = record

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        path, _, name = report.nodeid.partition("::")
        file = self._files[path]
        file.took_s += report.duration
        if report.when != "call" and report.passed:
            return
        file.counts[report.outcome] += 1
        if report.failed:
            said = str(report.longrepr).strip().splitlines()
            file.failed.append((name, said[-1][:300] if said else ""))
        self.write()

    def write(self) -> None:
        rows = [self._files[path].row(path.rpartition("/")[2]) for path in sorted(self._files)]
        self._record.rows = rows
        self._record.write()


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    machine: dict[str, Any] = describe_machine(device, "benchmarks.gpu.kernel_tests")
    listener = Listener(Record(args.out / "gpu.json", machine))
    tests = args.tests or (TINY_TESTS if args.tiny else TESTS)
    workers = 2 if args.tiny else min(MAX_WORKERS, os.cpu_count() or 1)
    options = [
        "-p",
        "tests.draws",
        "--everything",
        "-n",
        str(workers),
        "-p",
        "no:cacheprovider",
        "--tb=short",
        "-rf",
    ]
    left_out = [f"--ignore={path}" for path in LEFT_OUT]
    status = pytest.main([*options, *left_out, *tests], plugins=[listener])
    listener.write()
    return int(status)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.kernel_tests", description=__doc__)
    parser.add_argument("tests", nargs="*", metavar="FILE", help="[default: those of kernels]")
    parser.add_argument("--minutes", type=float, help="time after which the caller stops it")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true", help="one file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
