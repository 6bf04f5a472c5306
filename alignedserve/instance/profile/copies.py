"""Measures copies of KV of a few sizes, made in the same way as by instances (`live_transfers.py`), for the channels of
the cost model. They go between the engine's cache and memory like the pool's, and out of another instance's cache.

A prefill instance (channel `stage`) and a decode instance (`fetch`) load in the same way, so one measurement serves
both. A pull from a prefill instance (`admit`) needs a second instance's memory. On a CPU this process allocates such
memory. GPU memory can only be mapped by another process, and an instance sees no other GPU. So there `admit` is set to
`fetch`: no link between GPUs is slower than the one to the host.

After a server has run for a while, a request's blocks are scattered, and so they are here. Each size uses all of the
memory in turn, so that even a small copy finds little of it in the processor's caches.
"""

from __future__ import annotations

import logging
import random
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from alignedserve.engine.engine import Engine
from alignedserve.instance.config import QUICK_BYTES, TransferConfig
from alignedserve.instance.live_transfers import LiveTransfers
from alignedserve.instance.profile.fit_copies import Copied, fit_channel
from alignedserve.kv.format import BlockFormat
from alignedserve.timing.cost import Channels
from alignedserve.transport.channel import Identity
from alignedserve.transport.completions import Completions, Outcome
from alignedserve.transport.copiers import as_bytes
from alignedserve.transport.data_path import allocator
from alignedserve.transport.runs import Pairs
from alignedserve.types import BlockId, Epoch, InstanceId, PoolBlockId, RequestKey

# A context with memory like the pool's, given its format and number of columns.
PoolMemory = Callable[[BlockFormat, int], AbstractContextManager[NDArray[np.uint8]]]

# The most bytes of a copy, unless two columns have more. A GPU copies them in half a millisecond. They exceed a CPU
# core's share of the cache.
MAX_BYTES = 32 << 20
_STEP = 4
# The first round is not counted. It touches pages and opens connections.
MAX_ROUNDS = 8
_TIMEOUT_S = 10.0
_KEY, _EPOCH = RequestKey(0), Epoch(1)
_HERE, _THERE = InstanceId("profile"), InstanceId("profile-of-another")
_LINK = "ipc"


@dataclass(frozen=True)
class PoolEnd:
    """The pool's end of copies."""

    format: BlockFormat
    memory: PoolMemory


@dataclass(frozen=True)
class MeasuredChannels:
    channels: Channels
    # How `admit` was determined.
    note: str


def measure_channels(engine: Engine, pool: PoolEnd, budget_s: float) -> MeasuredChannels:
    """Measures for about `budget_s`, each size at least twice. `engine` must be idle, and is left idle. Raises OSError,
    ValueError or RuntimeError if there is no memory for it or a copy fails."""
    sizes = sizes_of(engine, pool.format)
    num_blocks = sizes[0] * engine.format.num_groups
    blocks = [BlockId(block) for block in range(num_blocks)]
    with pool.memory(pool.format, sizes[0]) as memory, _quiet(), ExitStack() as open_things:
        bench = open_things.enter_context(closing(CopyBench(engine, pool.format, memory, blocks)))
        copies: dict[str, Callable[[int, int], Outcome]] = {"load": bench.load, "save": bench.save}
        if not engine.cache.blocks.is_cuda:
            copies["pull"] = open_things.enter_context(closing(PullBench(engine, blocks))).pull
        found = _measure(copies, sizes, budget_s)
    save, load = fit_channel(found["save"]), fit_channel(found["load"])
    if "pull" not in found:
        return MeasuredChannels(
            Channels(save, load, load, load), "admit is fetch: see docs/how_it_works/cost_model.md"
        )
    return MeasuredChannels(Channels(save, load, fit_channel(found["pull"]), load), "admit is a pull by ipc")


def sizes_of(engine: Engine, pool_format: BlockFormat) -> list[int]:
    """Returns the sizes of the copies in columns, the largest first."""
    num_columns = engine.limits.num_blocks // engine.format.num_groups
    largest = max(min(num_columns, MAX_BYTES // pool_format.column_bytes), min(num_columns, 2))
    sizes = [largest]
    while sizes[-1] > 1:
        sizes.append(max(sizes[-1] // _STEP, 1))
    return sizes


def _measure(
    copies: dict[str, Callable[[int, int], Outcome]], sizes: Sequence[int], budget_s: float
) -> dict[str, list[Copied]]:
    """Returns the measured copies. `copies` make a copy, given its first column and the number of columns."""
    begun_s, choose = time.perf_counter(), random.Random(0)
    found: dict[str, list[Copied]] = {what: [] for what in copies}
    for number in range(MAX_ROUNDS):
        for size in sizes:
            first = choose.randrange(sizes[0] - size + 1)
            for what, copy in copies.items():
                outcome = copy(first, size)
                if number:
                    found[what].append(Copied(outcome.num_bytes, outcome.seconds))
        if number and time.perf_counter() - begun_s > budget_s:
            break
    return found


class CopyBench:
    """Copies between the engine's blocks and memory like the pool's."""

    def __init__(
        self,
        engine: Engine,
        pool_format: BlockFormat,
        memory: NDArray[np.uint8],
        blocks: Sequence[BlockId],
    ) -> None:
        parts, self._num_groups = engine.cache.parts, engine.format.num_groups
        quick_bytes = 0 if parts[0].is_cuda else QUICK_BYTES
        self._transfers = LiveTransfers(
            parts,
            _EPOCH,
            config=TransferConfig(quick_bytes=quick_bytes),
            pool_format=pool_format,
            num_groups=self._num_groups,
        )
        self._transfers.use_pool(memory)
        scattered = random.Random(0).sample(blocks, len(blocks))
        self._pairs = [*zip(scattered, map(PoolBlockId, range(len(blocks))), strict=True)]

    def load(self, first: int, num_columns: int) -> Outcome:
        outcomes: list[Outcome] = []
        self._transfers.load(_KEY, self._of(first, num_columns), outcomes.append)
        return _only(self._transfers.completions, outcomes)

    def save(self, first: int, num_columns: int) -> Outcome:
        outcomes: list[Outcome] = []
        self._transfers.save(_KEY, self._of(first, num_columns), 0, outcomes.append)
        return _only(self._transfers.completions, outcomes)

    def close(self) -> None:
        self._transfers.close()

    def _of(self, first: int, num_columns: int) -> Pairs:
        return self._pairs[first * self._num_groups : (first + num_columns) * self._num_groups]


class PullBench:
    """Pulls of blocks staged by another instance on this host. Both ends are in this process."""

    def __init__(self, engine: Engine, blocks: Sequence[BlockId]) -> None:
        parts, self._num_groups = engine.cache.parts, engine.format.num_groups
        self._blocks = random.Random(1).sample(blocks, len(blocks))
        theirs = [*_blocks_like(parts, len(blocks))]
        token, config = secrets.token_hex(16), TransferConfig(_LINK, timeout_s=_TIMEOUT_S)
        fingerprint = engine.format.describe()
        self._sender = LiveTransfers(theirs, _EPOCH, config=config)
        self._receiver = LiveTransfers(parts, _EPOCH, config=config)
        self._address = self._sender.listen(Identity(_THERE, _EPOCH, fingerprint, token))
        self._receiver.be_known_as(Identity(_HERE, _EPOCH, fingerprint, token))

    def pull(self, first: int, num_columns: int) -> Outcome:
        chosen = slice(first * self._num_groups, (first + num_columns) * self._num_groups)
        here, there = self._blocks[chosen], [BlockId(each) for each in range(chosen.start, chosen.stop)]
        sent: list[Outcome] = []
        pulled: list[Outcome] = []
        self._sender.stage(_KEY, there, sent.append)
        self._receiver.pull(_THERE, self._address, [(_KEY, here)], pulled.append)
        outcome = _only(self._receiver.completions, pulled)
        _only(self._sender.completions, sent)
        return outcome

    def close(self) -> None:
        self._receiver.close()
        self._sender.close()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps connections within this process out of the log."""
    logger = logging.getLogger("alignedserve.transport")
    level = logger.level
    logger.setLevel(max(logging.WARNING, logger.getEffectiveLevel()))
    try:
        yield
    finally:
        logger.setLevel(level)


def _blocks_like(parts: Sequence[torch.Tensor], num_blocks: int) -> Iterator[torch.Tensor]:
    """Yields memory of the same kind as a prefill instance's cache, with all pages touched."""
    for part in parts:
        blocks = allocator(_LINK)((num_blocks, *part.shape[1:]), dtype=part.dtype, device=part.device)
        as_bytes(blocks).zero_()
        yield blocks


def _only(completions: Completions, outcomes: list[Outcome]) -> Outcome:
    """Waits for the outcome of the only running copy."""
    completions.run(_TIMEOUT_S)
    if not outcomes:
        raise RuntimeError(f"a copy has not ended after {_TIMEOUT_S:g} s")
    if outcomes[0].error is not None:
        raise RuntimeError(f"{outcomes[0].what}: {outcomes[0].error}")
    return outcomes[0]
