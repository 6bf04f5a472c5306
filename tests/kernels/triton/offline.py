"""Compiles every kernel for Hopper (sm_90) on a machine without a GPU, as its wrapper would launch it there.

    python -m tests.kernels.triton.offline [NAME ...]

Prints what each compiled kernel uses. It can't run where Triton interprets, hence a process of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tests.kernels.triton.launches import LAUNCHES

TARGET = GPUTarget("cuda", 90, 32)


class NoDevice:
    """As much of a Triton driver as compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True)
class Usage:
    name: str
    num_warps: int
    registers: int
    # bytes per thread that did not fit registers
    stack: int
    shared: int
    # the widest loads and stores of device memory, in bits
    widest_load: int
    widest_store: int


def compile_launch(launch: Callable[[], Any]) -> list[Usage]:
    """What the launches within would compile, compiled, and nothing run."""
    compiled: list[Any] = []
    plain_run = JITFunction.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled.append(plain_run(kernel, *args, grid=grid, warmup=True, **options))

    JITFunction.run = run
    try:
        launch()
    finally:
        JITFunction.run = plain_run
    return [usage(kernel) for kernel in compiled]


def usage(kernel: Any) -> Usage:
    text = resource_usage(kernel.asm["cubin"])
    number = {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", text)}
    ptx = kernel.asm["ptx"]
    return Usage(
        kernel.metadata.name,
        kernel.metadata.num_warps,
        number["REG"],
        number["STACK"] + number["LOCAL"],
        kernel.metadata.shared,
        widest(ptx, "ld"),
        widest(ptx, "st"),
    )


def widest(ptx: str, instruction: str) -> int:
    sizes = re.findall(rf"\b{instruction}\.global[\w.:]*?(?:\.v(\d))?\.[bfsu](\d+) ", ptx)
    return max((int(count or 1) * int(bits) for count, bits in sizes), default=0)


def resource_usage(cubin: bytes) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main(names: list[str]) -> int:
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("unset TRITON_INTERPRET: the interpreter compiles nothing")
    driver.set_active(NoDevice())
    num_spilling = 0
    for name, launch in LAUNCHES.items():
        if names and not any(wanted in name for wanted in names):
            continue
        for use in compile_launch(launch):
            num_spilling += use.stack > 0
            print(
                f"{name:42} {use.name:28} warps {use.num_warps:2} registers {use.registers:3} "
                f"stack {use.stack:3} shared {use.shared:6} load {use.widest_load:3} store {use.widest_store:3}",
                flush=True,
            )
    return num_spilling


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
