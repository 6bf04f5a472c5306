"""A pool that says plainly what the real one must do: dicts, no tree, no table. The oldest candidates form a batch."""

from __future__ import annotations

from dataclasses import dataclass, field

from alignedserve.messages import (
    AnyMessage,
    Candidates,
    Commit,
    FindNear,
    FormBatch,
    MakeSpare,
    Release,
    Reserve,
    Reserved,
    Stored,
)
from alignedserve.sim.segment import SimSegment
from alignedserve.types import InstanceId, PoolBlockId, RequestKey


@dataclass
class Holding:
    blocks: list[PoolBlockId] = field(default_factory=list)
    num_tokens: int = 0
    is_candidate: bool = False
    is_spare: bool = False


class PlainPool:
    def __init__(self, segment: SimSegment, holdings: dict[RequestKey, Holding]) -> None:
        self._block_size = segment.block_size
        self.num_blocks = segment.num_blocks
        self.holdings = dict(holdings)
        taken = {block for held in self.holdings.values() for block in held.blocks}
        self.free = [PoolBlockId(block) for block in range(segment.num_blocks) if block not in taken]

    def on(self, message: AnyMessage, now: float) -> list[AnyMessage]:
        match message:
            case Reserve():
                return [self._reserve(message)]
            case Commit():
                held = self.holdings[message.key]
                held.num_tokens, held.is_candidate, held.is_spare = (
                    message.num_tokens,
                    message.is_candidate,
                    False,
                )
            case MakeSpare():
                for key in message.keys:
                    if key in self.holdings:
                        self.holdings[key].is_spare, self.holdings[key].is_candidate = True, False
            case Release():
                for key in message.keys:
                    self._release(key)
            case FormBatch():
                return [
                    self._candidates(
                        message.decode, message.max_blocks, message.max_requests, True, 0, 1 << 30
                    )
                ]
            case FindNear():
                found = self._candidates(
                    message.decode, message.max_blocks, message.max_requests, False, message.low, message.high
                )
                return [found]
            case _:
                raise ValueError(f"{message} is not for the pool")
        return []

    def tick(self, now: float) -> list[AnyMessage]:
        return []

    def inventory(self) -> list[Stored]:
        """Reservations too: who was given the blocks may be writing them."""
        return [Stored(key, list(held.blocks), held.num_tokens) for key, held in self.holdings.items()]

    def check(self) -> None:
        num_used = sum(len(held.blocks) for held in self.holdings.values())
        if num_used + len(self.free) != self.num_blocks:
            raise RuntimeError(f"{num_used} used + {len(self.free)} free != {self.num_blocks}")

    def check_idle(self) -> None:
        self.check()
        if self.holdings:
            raise RuntimeError(f"idle, but the pool holds {self.holdings}")

    def _reserve(self, order: Reserve) -> Reserved:
        held = self.holdings.get(order.key, Holding())
        missing = -(-order.num_tokens // self._block_size) - len(held.blocks)
        spares = [key for key, other in self.holdings.items() if other.is_spare and key != order.key]
        room = len(self.free) + sum(len(self.holdings[key].blocks) for key in spares)
        if missing > room:
            return Reserved(order.key, None)
        dropped = []
        while missing > len(self.free):
            dropped.append(spares.pop(0))
            self._release(dropped[-1])
        for _ in range(missing):
            held.blocks.append(self.free.pop())
        held.is_spare = False
        self.holdings[order.key] = held
        return Reserved(order.key, list(held.blocks), dropped)

    def _release(self, key: RequestKey) -> None:
        held = self.holdings.pop(key, None)
        if held:
            self.free.extend(held.blocks)

    def _candidates(
        self, decode: InstanceId, max_blocks: int, max_requests: int, is_batch: bool, low: int, high: int
    ) -> Candidates:
        keys: list[RequestKey] = []
        for key, held in self.holdings.items():
            fits = len(keys) < max_requests and len(held.blocks) <= max_blocks
            if held.is_candidate and fits and low <= held.num_tokens <= high:
                held.is_candidate = False
                max_blocks -= len(held.blocks)
                keys.append(key)
        return Candidates(decode, keys, is_batch)
