"""Times copies of KV blocks on a CPU, compared with this machine's memcpy in the same run.

    python -m benchmarks.transport [--block-kib N] [--blocks N] [--rounds N] [--threads N] [--busy] [--no-links]
                                   [--pool-kv-dtype int8] [--verify-blocks]

- save, load: a `Mover` between a KV cache and shared memory like the pool's. Blocks are in random order, so each is a
  separate copy. The time is from the call to the outcome.
- memcpy: libc's, of as many bytes of private memory, in one call, and in one call per core at the same time. These take
  turns with save and load (A B A B). It prints medians, and medians of the ratios of neighbours.
- numpy, ctypes, torch: the same copies on the calling thread (torch uses more), as the basis of the choice in
  `copiers.py`.
- gloo, ipc: pulls from another process, with blocks in order.

- With --verify-blocks only: save and load without checksums, with those of saves and a hundredth of the loaded blocks,
  and with all (A B C A B C); and checksums alone, on one thread.

With --busy another thread computes with torch meanwhile. With --pool-kv-dtype int8, save and load convert to and from
that format; GiB/s then refer to the cache's bytes.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import random
import statistics
import tempfile
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection

import numpy as np
import torch
from numpy.typing import NDArray

from alignedserve.kv.format import POOL_KV_DTYPES, BlockFormat
from alignedserve.transport.block_checks import BlockChecks, checksum
from alignedserve.transport.channel import Identity
from alignedserve.transport.completions import Completions, Outcome
from alignedserve.transport.copiers import as_bytes
from alignedserve.transport.data_path import allocator
from alignedserve.transport.kv_receiver import KVReceiver
from alignedserve.transport.kv_sender import KVSender
from alignedserve.transport.mover import Mover, PoolBlocks
from alignedserve.transport.staging_buffer import StagingBuffer
from alignedserve.types import BlockId, Epoch, InstanceId, PoolBlockId, RequestKey
from benchmarks.harness import in_turn, median_ratio, parser_of, seconds_of

AIM = 0.6
# Shares of the loaded blocks that are checked.
SHARES = (0.0, 0.01, 1.0)
KEY = RequestKey(1)
GIB = 1 << 30
Memory = NDArray[np.uint8]


@contextmanager
def shared_memory(num_blocks: int, block_bytes: int) -> Iterator[Memory]:
    """Yields a mapped memory file, as the pool's segment is. It has no name when it is used."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        os.posix_fallocate(file.fileno(), 0, num_blocks * block_bytes)
        mapped = mmap.mmap(file.fileno(), num_blocks * block_bytes)
    yield np.frombuffer(mapped, np.uint8).reshape(num_blocks, block_bytes)


def written_blocks(num_blocks: int, block_bytes: int, transport: str = "host") -> torch.Tensor:
    """Returns blocks with all pages touched. `transport` is the one that can send them."""
    shape = (num_blocks, block_bytes // 2)
    return allocator(transport)(shape, dtype=torch.bfloat16, device=torch.device("cpu")).fill_(1)


class Ways:
    """The measured ways. Each moves every block once, and returns when that is done."""

    def __init__(
        self, cache: torch.Tensor, pool: Memory, private: Memory, mover: Mover, completions: Completions
    ):
        self._cache, self._pool, self._private = as_bytes(cache), pool, private
        self._mover, self._completions = mover, completions
        order = list(range(len(pool)))
        random.Random(0).shuffle(order)
        self._pairs = [(BlockId(here), PoolBlockId(there)) for here, there in enumerate(order)]
        self._libc = ctypes.CDLL(None)
        self._num_cores = os.cpu_count() or 1
        self._cores = ThreadPoolExecutor(self._num_cores)

    def memcpy(self) -> None:
        self._memcpy(0, self._private.nbytes)

    def memcpy_all_cores(self) -> None:
        share = self._private.nbytes // self._num_cores
        list(self._cores.map(lambda core: self._memcpy(core * share, share), range(self._num_cores)))

    def _memcpy(self, first: int, num_bytes: int) -> None:
        there, here = self._private.ctypes.data + first, self._cache.data_ptr() + first
        self._libc.memcpy(ctypes.c_void_p(there), ctypes.c_void_p(here), ctypes.c_size_t(num_bytes))

    def save(self) -> None:
        self._mover.save(KEY, self._pairs, check)
        assert self._completions.run(timeout_s=60) == 1

    def load(self) -> None:
        self._mover.load(KEY, self._pairs, check)
        assert self._completions.run(timeout_s=60) == 1

    def numpy(self) -> None:
        cache = self._cache.numpy()
        for here, there in self._pairs:
            np.copyto(self._pool[there], cache[here])

    def ctypes(self) -> None:
        here_at, there_at, size = self._cache.data_ptr(), self._pool.ctypes.data, self._pool.shape[1]
        for here, there in self._pairs:
            ctypes.memmove(there_at + there * size, here_at + here * size, size)

    def torch(self) -> None:
        pool = torch.from_numpy(self._pool)
        for here, there in self._pairs:
            pool[there].copy_(self._cache[here])


def check(outcome: Outcome) -> None:
    if outcome.error is not None:
        raise RuntimeError(outcome.error)


@contextmanager
def computing(is_wanted: bool) -> Iterator[None]:
    stop = threading.Event()

    def compute() -> None:
        a = torch.rand((1024, 1024))
        while not stop.is_set():
            torch.mm(a, a)

    thread = threading.Thread(target=compute)
    if is_wanted:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if is_wanted:
            thread.join()


def compare(name: str, ways: Ways, num_bytes: int, rounds: int) -> float:
    """Returns the ratio to memcpy on all cores."""
    turns = (ways.memcpy, getattr(ways, name), ways.memcpy_all_cores)
    runs = {way.__name__: partial(seconds_of, way) for way in turns}
    one_s, own_s, every_s = in_turn(runs, rounds, num_warm_ups=1).values()
    one, own, every = (num_bytes / GIB / statistics.median(each) for each in (one_s, own_s, every_s))
    to_one, to_all = median_ratio(one_s, own_s), median_ratio(every_s, own_s)
    print(f"  {name:<8}{own:>14.1f}{one:>14.1f}{to_one:>8.2f}{every:>14.1f}{to_all:>8.2f}", flush=True)
    return to_all


def format_of(block_bytes: int) -> BlockFormat:
    """Returns the format of a bfloat16 model with 8 KV heads of 128, with as many layers as give blocks of this
    size."""
    layer = BlockFormat(1, 16, 8, 128, "bfloat16")
    if block_bytes % layer.block_bytes:
        raise ValueError(f"block_kib: must be a multiple of {layer.block_bytes >> 10} for int8")
    return replace(layer, num_layers=block_bytes // layer.block_bytes)


def measure_host(args: Namespace) -> bool:
    block_bytes = args.block_kib << 10
    num_bytes = args.blocks * block_bytes
    cache = written_blocks(args.blocks, block_bytes)
    names = ["save", "load", "numpy", "ctypes", "torch"]
    pool_block_bytes, form = block_bytes, None
    if args.pool_kv_dtype != "auto":
        form = format_of(block_bytes).in_pool(args.pool_kv_dtype)
        pool_block_bytes, names = form.block_bytes, names[:2]
        cache = cache.view(args.blocks, *form.shape).normal_()
    private = np.ones(num_bytes, np.uint8)
    completions = Completions()
    with shared_memory(args.blocks, pool_block_bytes) as pool, computing(args.busy):
        mover = Mover([cache], PoolBlocks(pool, form), Epoch(1), completions, num_threads=args.threads)
        ways = Ways(cache, pool, private, mover, completions)
        print(f"  {'GiB/s':<8}{'':>14}{'memcpy':>14}{'ratio':>8}{'all cores':>14}{'ratio':>8}")
        ratios = {name: compare(name, ways, num_bytes, args.rounds) for name in names}
        mover.close()
    reached = min(ratios["save"], ratios["load"]) >= AIM
    print(
        f"  aim: save and load at {AIM:.2f} of all cores' memcpy or more: {'reached' if reached else 'NOT reached'}"
    )
    return reached


def check_all(pool: Memory) -> None:
    for block in pool:
        checksum(block)


def measure_checks(args: Namespace) -> None:
    block_bytes = args.block_kib << 10
    num_bytes = args.blocks * block_bytes
    cache = written_blocks(args.blocks, block_bytes)
    with shared_memory(args.blocks, block_bytes) as pool, computing(args.busy):
        ways, movers = list[Ways](), list[Mover]()
        for share in SHARES:
            completions, words = Completions(), np.zeros(args.blocks, np.uint64)
            checks = BlockChecks(pool, words, share)
            movers.append(
                Mover(
                    [cache], PoolBlocks(pool, checks=checks), Epoch(1), completions, num_threads=args.threads
                )
            )
            ways.append(Ways(cache, pool, pool, movers[-1], completions))
        turns: list[Callable[[], None]] = [turn for each in ways for turn in (each.save, each.load)]
        turns.append(partial(check_all, pool))
        runs = {number: partial(seconds_of, turn) for number, turn in enumerate(turns)}
        times = in_turn(runs, args.rounds, num_warm_ups=1).values()
        medians = [statistics.median(each) for each in times]
        for mover in movers:
            mover.close()
    print(f"  checksums alone: {num_bytes / GIB / medians[-1]:.1f} GiB/s")
    print(f"  {'checked':<10}{'save, GiB/s':>14}{'load, GiB/s':>14}{'checks, of the load':>22}")
    plain_s = medians[1]
    for share, save_s, load_s in zip(SHARES, medians[0::2], medians[1::2], strict=False):
        rates = f"{num_bytes / GIB / save_s:>14.1f}{num_bytes / GIB / load_s:>14.1f}"
        print(f"  {share:<10}{rates}{max(1 - plain_s / load_s, 0.0):>22.0%}")


def identity(name: str) -> Identity:
    return Identity(InstanceId(name), Epoch(1), {}, token="benchmark")


def run_sender(pipe: Connection, transport: str, blocks: int, block_bytes: int, rounds: int) -> None:
    completions = Completions()
    staging_buffer = StagingBuffer(Epoch(1), completions)
    for key in range(rounds):
        staging_buffer.put(RequestKey(key), [BlockId(block) for block in range(blocks)], check)
    sender = KVSender(
        transport, [written_blocks(blocks, block_bytes, transport)], staging_buffer, identity("prefill-0")
    )
    pipe.send(sender.address)
    pipe.recv()
    sender.close()


def measure_link(transport: str, args: Namespace) -> None:
    block_bytes = args.block_kib << 10
    spawn = multiprocessing.get_context("spawn")
    pipe, theirs = spawn.Pipe()
    process = spawn.Process(
        target=run_sender, args=(theirs, transport, args.blocks, block_bytes, args.rounds), daemon=True
    )
    process.start()
    address = pipe.recv()
    completions = Completions()
    receiver = KVReceiver(
        transport, [written_blocks(args.blocks, block_bytes)], identity("decode-0"), completions
    )
    targets = [BlockId(block) for block in range(args.blocks)]

    def pull(key: int) -> None:
        receiver.pull(InstanceId("prefill-0"), address, [(RequestKey(key), targets)], check)
        assert completions.run(timeout_s=60) == 1

    rates = [args.blocks * block_bytes / GIB / seconds_of(pull, key) for key in range(args.rounds)]
    print(f"  {transport:<8}{statistics.median(rates[1:]):>14.1f}   between two processes")
    receiver.close()
    pipe.send("done")
    process.join()


def main() -> None:
    parser = parser_of(__doc__, rounds=15)
    parser.add_argument("--block-kib", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--no-links", action="store_true")
    parser.add_argument("--pool-kv-dtype", choices=tuple(POOL_KV_DTYPES), default="auto")
    parser.add_argument("--verify-blocks", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    print(f"{args.blocks} blocks of {args.block_kib} KiB, {torch.get_num_threads()} threads of torch's")
    if args.verify_blocks:
        measure_checks(args)
        return
    reached = measure_host(args)
    if not args.no_links:
        for transport in ("gloo", "ipc"):
            measure_link(transport, args)
    raise SystemExit(0 if reached else 1)


if __name__ == "__main__":
    main()
