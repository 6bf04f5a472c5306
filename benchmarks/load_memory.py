"""Peak memory of loading a checkpoint, over the size of the loaded model.

    python -m benchmarks.load_memory --gigabytes 2

The checkpoint is float32 in two shards, with layers of about 16 MB and an embedding of an eighth of it.
The model copies each tensor as it takes it. What the process held before loading is subtracted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from alignedserve.models.weights import SafetensorsSource

ROW = 2048
NUM_SHARDS = 2


def shapes(num_bytes: int) -> dict[str, tuple[int, int]]:
    num_rows = num_bytes // (4 * ROW)
    result = {"embed.weight": (num_rows // 8, ROW)}
    left = num_rows - num_rows // 8
    while left > 0:
        result[f"layers.{len(result)}.weight"] = (min(ROW, left), ROW)
        left -= ROW
    return result


def write_checkpoint(directory: Path, num_bytes: int) -> None:
    names = list(shapes(num_bytes))
    shards = {f"model-{index}.safetensors": names[index::NUM_SHARDS] for index in range(NUM_SHARDS)}
    for shard, members in shards.items():
        save_file({name: torch.ones(shapes(num_bytes)[name]) for name in members}, directory / shard)
    weight_map = {name: shard for shard, members in shards.items() for name in members}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def load_and_report(directory: Path, num_bytes: int, dtype: torch.dtype) -> None:
    # threads, allocator and code are there before the measurement
    torch.ones(1000, 1000).to(dtype).clone()
    baseline = status_bytes("VmRSS")
    # sets the peak back to what is held now
    Path("/proc/self/clear_refs").write_text("5")
    start = time.perf_counter()
    source = SafetensorsSource(directory, dtype, "cpu", progress=False)
    model = {name: source.take(name, shape).clone() for name, shape in shapes(num_bytes).items()}
    source.finish()
    seconds = time.perf_counter() - start
    model_bytes = sum(tensor.nbytes for tensor in model.values())
    peak = status_bytes("VmHWM") - baseline
    print(
        f"model={model_bytes / 1e9:.3f}GB peak={peak / 1e9:.3f}GB ratio={peak / model_bytes:.3f} "
        f"seconds={seconds:.2f} dtype={dtype}"
    )


def status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the checkpoint")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument(
        "--directory", type=Path, help="load the checkpoint that is there; for the child process"
    )
    arguments = parser.parse_args()
    num_bytes = int(arguments.gigabytes * 1e9)
    if arguments.directory:
        load_and_report(arguments.directory, num_bytes, getattr(torch, arguments.dtype))
        return
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(Path(directory), num_bytes)
        # in a fresh process: the peak of this one is that of writing
        subprocess.run(
            [sys.executable, "-m", "benchmarks.load_memory", *sys.argv[1:], "--directory", directory],
            check=True,
        )


if __name__ == "__main__":
    main()
