from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from alignedserve.transport.channel import Identity
from alignedserve.transport.completions import Outcome
from alignedserve.transport.data_path import allocator
from alignedserve.types import BlockId, Epoch, InstanceId, PoolBlockId, RequestKey

FINGERPRINT = {"model": "tiny", "dtype": "float32", "layout": "layer,kv,head,slot,dim"}
KEY = RequestKey(7)
# Seconds in which a broken connection must be noticed. A transfer's default deadline, which would end it too, is later.
AT_ONCE_S = 20.0


def identity(name: str, epoch: int = 1, token: str = "secret", **differing: str) -> Identity:
    return Identity(InstanceId(name), Epoch(epoch), FINGERPRINT | differing, token)


def filled_blocks(num_blocks: int, block_bytes: int, seed: int, transport: str = "host") -> torch.Tensor:
    """The bytes of a block depend on seed and block. `transport`: by which they can be sent."""
    shape = (num_blocks, block_bytes // 8, 4)
    blocks = allocator(transport)(shape, dtype=torch.bfloat16, device=torch.device("cpu"))
    noise = np.random.default_rng(seed).integers(0, 256, block_bytes, dtype=np.uint8)
    for block, data in enumerate(bytes_of(blocks)):
        np.add(noise, np.uint8(block % 256), out=data)
        data[:8] = np.array([block]).view(np.uint8)
    return blocks


def empty_blocks(num_blocks: int, block_bytes: int) -> torch.Tensor:
    return torch.zeros((num_blocks, block_bytes // 8, 4), dtype=torch.bfloat16)


def bytes_of(blocks: torch.Tensor) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return blocks.view(len(blocks), -1).view(torch.uint8).numpy()


def block_ids(*numbers: int) -> list[BlockId]:
    return [BlockId(number) for number in numbers]


def pairs(*numbers: tuple[int, int]) -> list[tuple[BlockId, PoolBlockId]]:
    return [(BlockId(here), PoolBlockId(there)) for here, there in numbers]


class Outcomes(list[Outcome]):
    """What `done` was called with."""

    @property
    def errors(self) -> list[str | None]:
        return [outcome.error for outcome in self]

    @property
    def only(self) -> Outcome:
        (outcome,) = self
        return outcome


def until(is_so: Callable[[], object], timeout_s: float) -> float:
    """Waits for it, and returns how long that took."""
    begin = time.monotonic()
    while not is_so():
        assert time.monotonic() < begin + timeout_s, f"not within {timeout_s} s"
        time.sleep(0.0005)
    return time.monotonic() - begin


def equal_blocks(
    ours: torch.Tensor, our_blocks: Sequence[int], theirs: torch.Tensor, their_blocks: Sequence[int]
) -> bool:
    return np.array_equal(bytes_of(ours)[list(our_blocks)], bytes_of(theirs)[list(their_blocks)])


@contextmanager
def leaving_no_thread() -> Iterator[None]:
    """What was there before, of other tests, does not count."""
    before = set(threading.enumerate())
    yield
    names = [thread.name for thread in set(threading.enumerate()) - before]
    assert not [
        name
        for name in names
        if name.startswith(("sender-connection", "kv-sender", "transfer-session", "mover"))
    ]
