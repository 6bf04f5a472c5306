from __future__ import annotations

from alignedserve.engine.gpu_memory import CONTEXT_BYTES, RESERVE_BYTES, MemoryUse, kv_share

GIB = 1 << 30
FIXED = CONTEXT_BYTES + RESERVE_BYTES


def test_what_is_left_of_the_share() -> None:
    alone = MemoryUse(num_total=100 * GIB, num_free=83 * GIB, num_own=16 * GIB)
    assert kv_share(alone, 2 * GIB, 0.9) == (90 - 16 - 2) * GIB - FIXED


def test_two_on_one_gpu_get_the_same_whoever_comes_first() -> None:
    first = MemoryUse(num_total=100 * GIB, num_free=83 * GIB, num_own=16 * GIB)
    # the other has its weights and its KV by now
    second = MemoryUse(num_total=100 * GIB, num_free=38 * GIB, num_own=16 * GIB)
    assert kv_share(first, 2 * GIB, 0.45) == kv_share(second, 2 * GIB, 0.45) == (45 - 16 - 2) * GIB - FIXED


def test_no_more_than_others_leave() -> None:
    crowded = MemoryUse(num_total=100 * GIB, num_free=10 * GIB, num_own=16 * GIB)
    assert kv_share(crowded, 2 * GIB, 0.9) == 8 * GIB - RESERVE_BYTES
