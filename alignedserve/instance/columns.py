"""The blocks of a request's columns, at an instance and in the pool, that a copy moves: column by column, those of all
groups of layers which have not passed the column (`protocol/kv_span.py`). Both ends of a copy list them so.
"""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.engine.request import Request
from alignedserve.instance.executor import Executor
from alignedserve.protocol.kv_span import KvSpan
from alignedserve.transport.runs import Pairs
from alignedserve.types import BlockId, PoolBlockId


def blocks_with(engine: Executor, request: Request, num_cached: int) -> list[BlockId]:
    """The request's blocks that hold what the token after the first `num_cached` attends to."""
    span = engine.span
    end = span.num_columns(num_cached)
    blocks, num_passed = engine.blocks_of(request, 0, end), span.num_passed(num_cached)
    return [block for block, is_held in zip(blocks, _held(span, 0, end, num_passed), strict=True) if is_held]


def pool_blocks(
    span: KvSpan, columns: Sequence[PoolBlockId], first: int, end: int, num_passed: int
) -> list[PoolBlockId]:
    """The pool's blocks, each of one group of layers, of a request whose columns lie in these places."""
    size = span.num_groups
    blocks = [PoolBlockId(column * size + group) for column in columns[first:end] for group in range(size)]
    return [
        block for block, is_held in zip(blocks, _held(span, first, end, num_passed), strict=True) if is_held
    ]


def pairs_of(
    engine: Executor,
    request: Request,
    columns: Sequence[PoolBlockId],
    first: int,
    end: int,
    num_passed: int,
) -> Pairs:
    """The request's blocks of columns `first` to `end`, each with the pool's."""
    span = engine.span
    held = _held(span, first, end, num_passed)
    here = [
        block for block, is_held in zip(engine.blocks_of(request, first, end), held, strict=True) if is_held
    ]
    return [*zip(here, pool_blocks(span, columns, first, end, num_passed), strict=True)]


def _held(span: KvSpan, first: int, end: int, num_passed: int) -> list[bool]:
    groups = range(span.num_groups)
    return [span.is_held(group, column, num_passed) for column in range(first, end) for group in groups]
