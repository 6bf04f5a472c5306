"""An engine without a schedule, for profiles, benchmarks and tests: a request has blocks for all of its tokens when it
is adopted, and gets more as it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from alignedserve.engine.engine import Engine
from alignedserve.engine.outputs import TokenOutput
from alignedserve.engine.request import NewRequest, Request, Work
from alignedserve.instance.memory import BlockManager
from alignedserve.types import BlockId


class DirectEngine:
    def __init__(self, engine: Engine) -> None:
        """`engine`: without requests. Nothing else may give its blocks to requests meanwhile."""
        self.engine = engine
        self.memory = BlockManager(engine.limits.num_blocks, replace(engine.span, window=0))

    def adopt(self, new: NewRequest, block_hashes: Sequence[bytes] = ()) -> Request:
        """`block_hashes`: those of its first blocks, which it shares. Raises RuntimeError if too few blocks are
        free."""
        request = self.engine.adopt(new)
        self.memory.share(new.held, block_hashes)
        try:
            self._grow(request, new.num_tokens)
        except RuntimeError:
            self.release(request)
            raise
        return request

    def join(self, request: Request) -> None:
        self.engine.join(request)

    def begin(self, new: NewRequest) -> Request:
        """Adopts a request that joins at once."""
        request = self.adopt(new)
        self.engine.join(request)
        return request

    def part(self, request: Request) -> None:
        self.engine.part(request)

    def release(self, request: Request) -> None:
        self.engine.release(request)
        self.memory.free(request.held)

    def grow(self, work: Work) -> None:
        """Gives the requests blocks for these tokens."""
        for request, count in work:
            self._grow(request, request.num_computed + count)

    def execute(self, work: Work) -> list[TokenOutput]:
        self.grow(work)
        return self.engine.execute(work)

    def blocks_of(self, request: Request) -> list[BlockId]:
        return self.memory.in_columns(request.held)

    def check_idle(self) -> None:
        self.engine.check_idle()
        self.memory.check_owners([])

    def _grow(self, request: Request, num_tokens: int) -> None:
        num_columns = request.layout.num_columns(num_tokens, self.engine.limits.block_size)
        if not self.memory.grow(request.held, num_columns):
            count = self.memory.num_missing(request.held, num_columns)
            raise RuntimeError(
                f"{request.request_id}: {count} blocks are needed for {num_tokens} tokens, and "
                f"{self.memory.num_free} are free"
            )
