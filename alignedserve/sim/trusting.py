"""An instance's engine and copies without contents of blocks: they only count, and take time. Requests get the same
tokens, blocks and seconds as with `SimEngine` and `SimTransfers`, which check the KV that each of them uses."""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.engine.request import NewRequest, Request
from alignedserve.instance.memory import BlockManager
from alignedserve.sim.block_contents import BlockContents, Digest
from alignedserve.sim.executor import SimEngine
from alignedserve.sim.segment import Content, SimSegment
from alignedserve.sim.transfers import SimTransfers
from alignedserve.transport.runs import Pairs
from alignedserve.types import BlockId, PoolBlockId, RequestKey


class NoContents(BlockContents):
    """Contents of blocks that are never written, so nothing can be saved or restored."""

    def save(self, key: RequestKey, block: BlockId, index: int, first: int, end: int, digest: Digest) -> None:
        pass

    def restore(self, key: RequestKey, block: BlockId, index: int, first: int, end: int) -> None:
        pass


class TrustingEngine(SimEngine):
    has_contents = False

    def _make_contents(self) -> BlockContents:
        return NoContents(self.limits.block_size)

    def _make_memory(self) -> BlockManager:
        return BlockManager(self.limits.num_blocks, self.span)

    def _know_tokens(self, new: NewRequest) -> None:
        pass

    def _check_content(self, request: Request) -> None:
        pass

    def _embedding(self, request: Request) -> bytes:
        return b""


class TrustingTransfers(SimTransfers):
    def _in_pool(self, segment: SimSegment, key: RequestKey, blocks: Sequence[PoolBlockId]) -> list[Content]:
        return []

    def _to_save(self, key: RequestKey, pairs: Pairs, num_empty: int) -> list[tuple[PoolBlockId, Content]]:
        return []

    def to_pull(self, owners: Sequence[RequestKey], blocks: Sequence[BlockId]) -> list[Content]:
        return []

    def _hold(self, blocks: Sequence[BlockId], contents: Sequence[Content]) -> None:
        pass
