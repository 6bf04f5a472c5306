"""Measures KV transfer between two processes on one GPU with `ipc`: a sender in its own process, a receiver here.

All blocks are pulled at once, in random order so that each block is its own copy, and timed from the call to the
outcome. The received bytes are compared with the sender's. The share is relative to a large copy within the GPU
(`ceilings`), if that was measured. `first_s` is the first pull, including connecting and mapping.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from alignedserve.transport.channel import Identity
from alignedserve.transport.completions import Completions, Outcome
from alignedserve.transport.data_path import allocator
from alignedserve.transport.kv_receiver import KVReceiver
from alignedserve.transport.kv_sender import KVSender
from alignedserve.transport.staging_buffer import StagingBuffer
from alignedserve.types import BlockId, Epoch, InstanceId, RequestKey
from benchmarks.gpu.bench import Bench, free_memory
from benchmarks.gpu.moves import scattered
from benchmarks.gpu.record import Row

MIB = 1 << 20
# Sizes of a block: of a small model, of llama-3.1-8b, of (nearly) opt-13b.
BLOCK_MIB = (1, 2, 12)
NUM_BYTES = 1 << 30
REPEATS = 12
SENDER, RECEIVER = InstanceId("prefill-0"), InstanceId("decode-0")
MAX_PULL_S = 10.0
# Seconds to end by itself.
END_S = 5.0


def run(bench: Bench) -> None:
    if not bench.has_time("-", bench.pick(15, 1)):
        return
    with sender(bench) as pipe:
        for mib in BLOCK_MIB:
            bench.case(f"{mib} MiB blocks", pulls, bench, pipe, mib * MIB)


def pulls(bench: Bench, pipe: Connection, block_bytes: int) -> Row:
    num_blocks, repeats = max(4, bench.pick(NUM_BYTES, 32 * MIB) // block_bytes), bench.pick(REPEATS, 3)
    address = ask(bench, pipe, (num_blocks, block_bytes, repeats))
    ours = torch.zeros((num_blocks, block_bytes // 4), dtype=torch.int32, device=bench.device)
    try:
        seconds = _timed(bench, ours, address, repeats)
    finally:
        ask(bench, pipe, None)
    pairs = torch.tensor(scattered(num_blocks, seed=0))
    if not torch.equal(ours[pairs[:, 0]], noise(num_blocks, block_bytes, bench.device)[pairs[:, 1]]):
        raise RuntimeError("what arrived is not what was sent")
    per_s = num_blocks * block_bytes / statistics.median(seconds[1:])
    row: Row = {
        "block_bytes": block_bytes,
        "num_blocks": num_blocks,
        "pull_per_s": per_s,
        "first_s": seconds[0],
        "repeats": repeats - 1,
        "is_right": True,
    }
    text = f"{per_s / 1e9:.1f} GB/s, the right bytes; first {seconds[0] * 1e3:.1f} ms"
    if "copy_bytes_per_s" in bench.ceilings:
        # The copy's rate counts bytes read plus bytes written.
        row["share"] = per_s / (bench.ceilings["copy_bytes_per_s"] / 2)
        text += f"; {row['share']:.1%} of a copy"
    return row | {"summary": text}


def _timed(bench: Bench, ours: torch.Tensor, address: str, repeats: int) -> list[float]:
    targets = [here for here, _ in scattered(len(ours), seed=0)]
    completions, outcomes, seconds = Completions(), list[Outcome](), []
    bench.synchronize()
    with closing(KVReceiver("ipc", [ours], identity(RECEIVER), completions)) as receiver:
        for key in range(repeats):
            begin, timeout_s = time.perf_counter(), max(0.1, min(MAX_PULL_S, bench.seconds_left))
            receiver.pull(SENDER, address, [(RequestKey(key), targets)], outcomes.append, timeout_s)
            completions.run(timeout_s + END_S)
            seconds.append(time.perf_counter() - begin)
            if len(outcomes) <= key or outcomes[key].error:
                raise RuntimeError(outcomes[key].error if outcomes[key:] else "a pull without an outcome")
    return seconds


# ---- the other process ----


def run_sender(pipe: Connection, device_name: str, seed: int = 0) -> None:
    """Makes blocks for every request and sends where they can be pulled. None frees them. Ends when the pipe closes."""
    device = torch.device(device_name)
    while True:
        try:
            num_blocks, block_bytes, repeats = pipe.recv()
        except EOFError:
            return
        try:
            _send(pipe, device, num_blocks, block_bytes, repeats, seed)
        except EOFError:
            return
        except Exception as error:
            pipe.send(RuntimeError(f"the sender: {type(error).__name__}: {error}"))


def _send(
    pipe: Connection, device: torch.device, num_blocks: int, block_bytes: int, repeats: int, seed: int
) -> None:
    blocks = noise(num_blocks, block_bytes, device, seed)
    staging_buffer = StagingBuffer(Epoch(1), Completions())
    sources = [BlockId(there) for _, there in scattered(num_blocks, seed=0)]
    for key in range(repeats):
        staging_buffer.put(RequestKey(key), sources, lambda _: None)
    with closing(KVSender("ipc", [blocks], staging_buffer, identity(SENDER))) as sender:
        pipe.send(sender.address)
        pipe.recv()
    del blocks
    free_memory()
    pipe.send("gone")


def noise(num_blocks: int, block_bytes: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Returns the same values in every process."""
    blocks = allocator("ipc")((num_blocks, block_bytes // 4), dtype=torch.int32, device=device)
    blocks.random_(generator=torch.Generator(device).manual_seed(seed))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return blocks


def identity(name: InstanceId) -> Identity:
    return Identity(name, Epoch(1), {}, token="benchmark")


@contextmanager
def sender(bench: Bench) -> Iterator[Connection]:
    """Yields the pipe to the sender, which ends with the block, and with this process however that ends."""
    spawn = multiprocessing.get_context("spawn")
    pipe, theirs = spawn.Pipe()
    process = spawn.Process(target=run_sender, args=(theirs, str(bench.device)), daemon=True)
    process.start()
    theirs.close()
    try:
        yield pipe
    finally:
        pipe.close()
        process.join(END_S)
        process.kill()
        process.join()


def ask(bench: Bench, pipe: Connection, question: object) -> Any:
    pipe.send(question)
    if not pipe.poll(max(0.1, bench.seconds_left)):
        raise RuntimeError("the sender says nothing")
    answer = pipe.recv()
    if isinstance(answer, Exception):
        raise answer
    return answer
