"""Measures moves of KV blocks between the GPU and the pool's memory, with the instances' Mover and a pool's segment.

It saves and loads several hundred blocks in random order, so that each block is its own copy, timed from the call to
the outcome. Each direction is measured alone, then both at once, then both while a batch decodes. That batch's steps
are timed with and without moves in turn, A B A B. Rates are shares of one large copy of pinned memory in the same
direction (`ceilings`). Moved bytes are compared. Targets: 90% of such a copy, and decode steps at most 3% longer.
"""

from __future__ import annotations

import mmap
import os
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from alignedserve.engine.build import BuiltEngine
from alignedserve.kv.format import BlockFormat
from alignedserve.kvpool.segment import DIRECTORY, Segment
from alignedserve.transport.completions import Completions, Outcome
from alignedserve.transport.cuda import DriverCopies
from alignedserve.transport.mover import Mover, PoolBlocks
from alignedserve.transport.runs import Pairs
from alignedserve.types import BlockId, Epoch, PoolBlockId, RequestKey
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.ceilings import ceiling
from benchmarks.gpu.decoding import Decoding, engine_for
from benchmarks.gpu.record import Row

MIB = 1 << 20
AIM_SHARE, AIM_SLOW_DOWN = 0.90, 0.03
# Formats by MiB per block: a small model's, llama-3.1-8b's, and one near opt-13b's.
FORMATS = {
    1: BlockFormat(16, 16, 8, 128, "bfloat16"),
    2: BlockFormat(32, 16, 8, 128, "bfloat16"),
    12: BlockFormat(48, 16, 32, 128, "bfloat16"),
}
NUM_BYTES = 1 << 30
SAVES, LOADS = RequestKey(1), RequestKey(2)


def slow_down(without: list[float], with_moves: list[float]) -> float:
    return statistics.median(with_moves) / statistics.median(without) - 1


def scattered(num_blocks: int, seed: int) -> Pairs:
    """Returns every block once at each end, with no two pairs adjacent at both ends."""
    here, there = list(range(num_blocks)), list(range(num_blocks))
    random.Random(seed).shuffle(here)
    random.Random(seed + 1).shuffle(there)
    return [(BlockId(a), PoolBlockId(b)) for a, b in zip(here, there, strict=True)]


def run(bench: Bench) -> None:
    for mib, form in FORMATS.items():
        bench.case(f"{mib} MiB blocks", plain, bench, form)
    if bench.is_cuda and DriverCopies.can_batch:
        bench.case("2 MiB blocks, one call each", one_by_one, bench, FORMATS[2])
    lengths = [bench.pick(1024, 64)] * bench.pick(32, 2)
    for model in bench.models("llama-3.1-8b"):
        if bench.has_time(f"{model} decoding", bench.pick(20, 1)):
            decode_beside(bench, model, lengths)


def one_by_one(bench: Bench, form: BlockFormat) -> Row:
    DriverCopies.can_batch = False
    try:
        return plain(bench, form)
    finally:
        DriverCopies.can_batch = True


def plain(bench: Bench, form: BlockFormat) -> Row:
    num_blocks = max(4, bench.pick(NUM_BYTES, 64 * MIB) // form.block_bytes // 2 * 2)
    shape = (num_blocks, form.block_bytes // 4)
    with pool_memory(form, num_blocks) as (pool, kind):
        cache = torch.randint(0, 1 << 30, shape, dtype=torch.int32, device=bench.device)
        completions = Completions()
        mover = Mover([cache], PoolBlocks(pool), Epoch(1), completions)
        try:
            row = _rates(bench, mover, completions, scattered(num_blocks, seed=0), cache, pool)
        finally:
            mover.close()
    return {"block_bytes": form.block_bytes, "num_blocks": num_blocks, "memory": kind, **row}


def _rates(
    bench: Bench,
    mover: Mover,
    completions: Completions,
    pairs: Pairs,
    cache: torch.Tensor,
    pool: NDArray[np.uint8],
) -> Row:
    repeats, num_bytes = bench.pick(12, 2), len(pairs) * pool.shape[1]
    half = len(pairs) // 2
    saves = [_timed(mover, completions, pairs, ()) for _ in range(repeats)]
    _check_equal(cache, pool, pairs)
    pool[:] = pool[::-1].copy()
    loads = [_timed(mover, completions, (), pairs) for _ in range(repeats)]
    _check_equal(cache, pool, pairs)
    both = [_timed(mover, completions, pairs[:half], pairs[half:]) for _ in range(repeats)]
    _check_equal(cache, pool, pairs)
    row: Row = {
        "save_per_s": num_bytes / statistics.median(saves[1:]),
        "load_per_s": num_bytes / statistics.median(loads[1:]),
        "both_per_s": num_bytes / statistics.median(both[1:]),
        "repeats": repeats - 1,
        "aim": AIM_SHARE,
    }
    gb = {name: row[f"{name}_per_s"] / 1e9 for name in ("save", "load", "both")}
    text = f"save {gb['save']:.1f} GB/s, load {gb['load']:.1f}, both {gb['both']:.1f}"
    if bench.is_cuda:
        row["save_share"] = row["save_per_s"] / ceiling(bench, "d2h_bytes_per_s")
        row["load_share"] = row["load_per_s"] / ceiling(bench, "h2d_bytes_per_s")
        text += f": {row['save_share']:.1%}, {row['load_share']:.1%} (aim {AIM_SHARE:.0%})"
    return row | {"summary": text}


def _timed(mover: Mover, completions: Completions, saved: Pairs, loaded: Pairs) -> float:
    outcomes: list[Outcome] = []
    begin = time.perf_counter()
    if saved:
        mover.save(SAVES, saved, outcomes.append)
    if loaded:
        mover.load(LOADS, loaded, outcomes.append)
    while len(outcomes) < bool(saved) + bool(loaded):
        completions.run(timeout_s=30.0)
    seconds = time.perf_counter() - begin
    for outcome in outcomes:
        if outcome.error:
            raise RuntimeError(f"{outcome.what}: {outcome.error}")
    return seconds


def _check_equal(cache: torch.Tensor, pool: NDArray[np.uint8], pairs: Pairs) -> None:
    here = [here for here, _ in pairs]
    there = [there for _, there in pairs]
    on_device = cache.view(len(cache), -1).view(torch.uint8)[here].cpu().numpy()
    if not np.array_equal(on_device, pool[there]):
        raise RuntimeError("what arrived is not what was sent")


@contextmanager
def pool_memory(form: BlockFormat, num_blocks: int) -> Iterator[tuple[NDArray[np.uint8], str]]:
    """Yields a segment as the pool makes it, or plain memory if there is too little shared memory, and says which it
    is."""
    disk = os.statvfs(DIRECTORY)
    if num_blocks * form.block_bytes > 0.9 * disk.f_bavail * disk.f_frsize:
        memory = mmap.mmap(-1, num_blocks * form.block_bytes)
        yield np.frombuffer(memory, np.uint8).reshape(num_blocks, form.block_bytes), "anonymous"
        return
    name = f"alignedserve-bench-{os.getpid()}"
    segment = Segment.create(name, form, num_blocks)
    try:
        yield segment.blocks, "segment"
    finally:
        segment.close()
        Segment.unlink(name)


def decode_beside(bench: Bench, model: str, lengths: list[int]) -> None:
    rounds, num_steps = 3, bench.pick(40, 3)
    max_steps, num_moved = 2 * (rounds + 1) * num_steps, bench.pick(512, 8)
    try:
        with engine_for(bench, model, [lengths], max_steps, spare_blocks=num_moved) as built:
            name = f"{model} decoding {len(lengths)} x {lengths[0]}"
            bench.case(name, beside, bench, built, lengths, num_moved, rounds, num_steps)
    except Exception:
        bench.fail(model)


def beside(
    bench: Bench, built: BuiltEngine, lengths: list[int], num_moved: int, rounds: int, num_steps: int
) -> Row:
    engine = built.engine
    form, max_steps = engine.cache.format, 2 * (rounds + 1) * num_steps
    # The last blocks, which no request of this benchmark gets.
    first = engine.limits.num_blocks - num_moved
    pairs = [(BlockId(first + here), there) for here, there in scattered(num_moved, seed=0)]
    with pool_memory(form, num_moved) as (pool, kind):
        # Small random numbers: later requests may use loaded blocks as KV, although these are never attended to.
        pool[:] = np.random.default_rng(0).integers(0, 60, pool.shape[1], dtype=np.uint8)
        completions = Completions()
        mover = Mover(engine.cache.parts, PoolBlocks(pool), Epoch(1), completions)
        try:
            with Decoding(engine, lengths, max_steps) as batch:
                row = _alternate(batch, Traffic(mover, completions, pairs), rounds, num_steps)
        finally:
            mover.close()
    slower = slow_down(row["without_s"], row["with_s"])
    text = f"{statistics.median(row['without_s']) * 1e3:.3f} ms a step, {slower:+.2%} beside "
    text += f"{row['moved_per_s'] / 1e9:.1f} GB/s (aim {AIM_SLOW_DOWN:+.0%})"
    return {**row, "slow_down": slower, "aim": AIM_SLOW_DOWN, "memory": kind, "summary": text}


class Traffic:
    """Saves and loads without a pause. Each transfer moves a part of the blocks and restarts once its outcome is picked
    up."""

    num_transfers = 4

    def __init__(self, mover: Mover, completions: Completions, pairs: Pairs) -> None:
        self._mover, self.completions = mover, completions
        # Two each way: while the outcome of one waits to be picked up, the other continues.
        self._parts = [pairs[first :: self.num_transfers] for first in range(self.num_transfers)]
        self._is_on = False
        self._num_open = 0
        self.num_bytes = 0

    def start(self) -> None:
        self._is_on, self.num_bytes = True, 0
        for part in range(self.num_transfers):
            self._move(part)

    def stop(self) -> None:
        """Returns once the last transfer has ended."""
        self._is_on = False
        while self._num_open:
            self.completions.run(timeout_s=30.0)

    def _move(self, part: int) -> None:
        def ended(outcome: Outcome) -> None:
            self._num_open -= 1
            if outcome.error:
                raise RuntimeError(f"{outcome.what}: {outcome.error}")
            self.num_bytes += outcome.num_bytes
            if self._is_on:
                self._move(part)

        self._num_open += 1
        move, key = (self._mover.save, SAVES) if part % 2 else (self._mover.load, LOADS)
        move(key, self._parts[part], ended)


def _alternate(batch: Decoding, traffic: Traffic, rounds: int, num_steps: int) -> Row:
    """Measures seconds from one step's end to the next step's end, like an instance's loop."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    moved_bytes, moving_s = 0, 0.0
    for number in range(2 * rounds + 2):
        has_moves = bool(number % 2)
        if has_moves:
            traffic.start()
        taken = _steps(batch, traffic.completions, num_steps)
        if has_moves:
            moved_bytes, moving_s = moved_bytes + traffic.num_bytes, moving_s + sum(taken)
            traffic.stop()
        # The first of each kind warm up.
        if number >= 2:
            seconds[has_moves] += taken
    return {
        "without_s": seconds[False],
        "with_s": seconds[True],
        "moved_per_s": moved_bytes / moving_s,
        "rounds": rounds,
        "steps_a_round": num_steps,
    }


def _steps(batch: Decoding, completions: Completions, num_steps: int) -> list[float]:
    taken = []
    for _ in range(num_steps):
        begin = time.perf_counter()
        batch.step()
        completions.run()
        taken.append(time.perf_counter() - begin)
    return taken
