"""Does this host fit what requirements.lock pins? `ray up` runs it on every node before anything is installed there.

It needs Python 3.6 and nothing else, so that it can say what is wrong with an image that is too old for the rest.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator

# What the lock needs at least: a test reads it from the wheels, so a newer lock that needs more makes it fail.
MIN_PYTHON = (3, 11)
MIN_GLIBC = (2, 34)
# the first of NVIDIA's drivers that runs CUDA 13
MIN_DRIVER = 580

OTHER_IMAGE = "take another image (docs/guides/deploying.md says which)"


def version_of(text: str) -> "tuple[int, ...]":
    return tuple(int(part) for part in text.split(".")[:2])


def dotted(version: "tuple[int, ...]") -> str:
    return ".".join(map(str, version))


def problems_of_the_image(python: str, glibc: str, driver: "str | None") -> "Iterator[str]":
    """Yields a line for each thing that is too old. `driver` is None where there is none."""
    if version_of(python) < MIN_PYTHON:
        yield f"Python is {python}, and {dotted(MIN_PYTHON)} or newer is needed: {OTHER_IMAGE}"
    if not glibc:
        yield f"the C library is not glibc, which all wheels need: {OTHER_IMAGE}"
    elif version_of(glibc) < MIN_GLIBC:
        yield f"glibc is {glibc}, and {dotted(MIN_GLIBC)} or newer is needed: {OTHER_IMAGE}"
    if driver is not None and version_of(driver)[0] < MIN_DRIVER:
        yield f"the NVIDIA driver is {driver}, and {MIN_DRIVER} or newer is needed: {OTHER_IMAGE}"


def problems_of_the_size(
    num_gpus: int, shm_bytes: int, needs_gpus: int, needs_shm_bytes: int
) -> "Iterator[str]":
    """Yields a line for each thing of which the host has too little."""
    if num_gpus < needs_gpus:
        yield f"{num_gpus} GPUs are here, and {needs_gpus} are needed: a larger InstanceType, or fewer instances"
    if shm_bytes < needs_shm_bytes:
        yield (
            f"{shm_bytes} bytes of /dev/shm are free, and the pool is to have {needs_shm_bytes}: "
            "a larger machine, or a smaller --pool-memory-bytes"
        )


def drivers() -> "list[str]":
    """Returns the version of the driver for each GPU."""
    if shutil.which("nvidia-smi") is None:
        return []
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(asked, stdout=subprocess.PIPE, universal_newlines=True)  # noqa: UP021
    # without a GPU it fails, and says so where a version is expected
    return answer.stdout.split() if answer.returncode == 0 else []


def main() -> None:
    parser = argparse.ArgumentParser(description="Does this host fit? It says what does not, a line each.")
    parser.add_argument("--gpus", type=int, default=0, help="that the instances need")
    parser.add_argument("--pool-memory-bytes", type=int, default=0, help="of shared memory, as for serve")
    wanted = parser.parse_args()
    found = drivers()
    shm = os.statvfs("/dev/shm")
    image = problems_of_the_image(
        platform.python_version(), platform.libc_ver()[1], found[0] if found else None
    )
    size = problems_of_the_size(
        len(found), shm.f_bavail * shm.f_frsize, wanted.gpus, wanted.pool_memory_bytes
    )
    lines = ["this host does not fit: " + line for line in (*image, *size)]
    sys.exit("\n".join(lines) or 0)


if __name__ == "__main__":
    main()
