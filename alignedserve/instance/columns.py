"""The blocks that a copy moves, in the instance and in the pool: column by column, those of all layer groups that have
not passed the column (`protocol/kv_span.py`). Both ends of a copy list them in this order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from alignedserve.engine.request import Request
from alignedserve.instance.executor import Executor
from alignedserve.protocol.kv_span import KvSpan
from alignedserve.transport.runs import Pairs
from alignedserve.types import BlockId, PoolBlockId


def blocks_with(engine: Executor, request: Request, num_cached: int) -> list[BlockId]:
    """Returns the request's blocks that the token after the first `num_cached` attends to."""
    span = engine.span
    end = span.num_columns(num_cached)
    return [*compress(engine.blocks_of(request, 0, end), span.are_held(0, end, span.num_passed(num_cached)))]


def pool_blocks(
    span: KvSpan, columns: Sequence[PoolBlockId], first: int, end: int, num_passed: int
) -> list[PoolBlockId]:
    """Returns the pool's blocks, one per layer group, for columns `first` to `end` of a request with these
    `columns`."""
    size = span.num_groups
    blocks = [PoolBlockId(column * size + group) for column in columns[first:end] for group in range(size)]
    return [*compress(blocks, span.are_held(first, end, num_passed))]


def pairs_of(
    engine: Executor,
    request: Request,
    columns: Sequence[PoolBlockId],
    first: int,
    end: int,
    num_passed: int,
) -> Pairs:
    """Returns the request's blocks in columns `first` to `end`, each with its pool block."""
    here = compress(engine.blocks_of(request, first, end), engine.span.are_held(first, end, num_passed))
    return [*zip(here, pool_blocks(engine.span, columns, first, end, num_passed), strict=True)]
