from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from alignedserve.protocol.messages import InstanceLimits
from alignedserve.scheduling.policies.aligned.decode.eviction import by_worth

GROUPS = {"num_full_groups": 1, "num_sliding_groups": 2}


def request(num_cached: int, num_pooled: int, limits: InstanceLimits) -> Any:
    span = limits.span
    return SimpleNamespace(
        key=num_pooled,
        is_rt=False,
        num_left=1,
        num_pooled=num_pooled,
        num_blocks=span.num_held(num_cached, num_cached + 1),
        num_passed=span.num_passed(num_cached),
        num_columns=span.num_columns(num_cached + 1),
    )


def in_order(limits: InstanceLimits, *requests: Any) -> list[int]:
    at: Any = SimpleNamespace(limits=limits, was_evicted=lambda each: False)
    return [each.key for each in by_worth(requests, at, lambda each: False)]


def limits_of(window: int = 0, **groups: Any) -> InstanceLimits:
    return InstanceLimits(999, 16, 8, max_num_batched_tokens=32, max_model_len=1000, window=window, **groups)


def test_who_has_the_fewest_blocks_to_move_leaves_first() -> None:
    limits = limits_of()
    assert in_order(limits, *(request(300, num, limits) for num in (0, 160, 300))) == [300, 160, 0]


def test_what_is_passed_need_not_be_moved() -> None:
    """Of the first, the pool has nothing that it holds; of the others two and four of its eight blocks."""
    limits = limits_of(window=20)
    assert request(300, 0, limits).num_passed == 16
    assert in_order(limits, *(request(300, num, limits) for num in (160, 272, 299))) == [299, 272, 160]


def test_full_groups_are_moved_though_sliding_ones_have_passed() -> None:
    limits = limits_of(window=20, **GROUPS)
    ours = request(300, 160, limits)
    assert (ours.num_passed, ours.num_blocks) == (16, 19 + 2 * 3)
    # The pool has 10 of its 25 blocks, and none of the other one's 13.
    other = request(100, 0, limits)
    assert other.num_blocks == 7 + 2 * 3 and other.num_passed == 4
    assert in_order(limits, ours, other) == [0, 160]
    assert in_order(limits, request(300, 224, limits), other) == [224, 0]
