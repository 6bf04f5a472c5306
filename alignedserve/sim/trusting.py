"""An engine that only counts and takes time: its blocks hold nothing, and all tokens are 0. When requests end, and how
long iterations take, is as with `SimEngine`, which looks at all KV, and takes most of a simulation's time for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from alignedserve.engine.blocks import Grown
from alignedserve.engine.request import Request
from alignedserve.sim.block_contents import BlockContents, Digest
from alignedserve.sim.executor import SimEngine
from alignedserve.types import BlockId, RequestId, RequestKey


class NoContents(BlockContents):
    """Blocks of which nobody asks what they hold."""

    def is_reversed(self, key: RequestKey, is_reversed: bool) -> None:
        pass

    def forget(self, key: RequestKey) -> None:
        pass

    def clear(self, block: BlockId) -> None:
        pass

    def save(self, key: RequestKey, block: BlockId, index: int, first: int, end: int, digest: Digest) -> None:
        pass

    def restore(self, key: RequestKey, block: BlockId, index: int, first: int, end: int) -> None:
        pass

    def drop(self, key: RequestKey) -> None:
        pass

    def copy(self, key: RequestKey, old: BlockId, new: BlockId) -> None:
        pass


class TrustingEngine(SimEngine):
    has_contents: ClassVar[bool] = False

    def _make_contents(self) -> BlockContents:
        return NoContents(self.limits.block_size)

    def _know_tokens(
        self, request_id: RequestId, prompt: Sequence[int], seed: int, output: Sequence[int], adapter: str
    ) -> None:
        pass

    def _check_content(self, request: Request) -> None:
        pass

    def _clear(self, grown: Sequence[Grown]) -> None:
        pass
