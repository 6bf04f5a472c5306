"""The two ways differ only in the way, and the page tells which is which."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.hand_over.simulated import CASES, measure, page


def test_the_direct_way_is_taken_and_the_other_is_not() -> None:
    case = replace(CASES[0], rate=1.0)
    through_pool, directly = (measure(case, way, 40.0) for way in ("through the pool", "directly"))
    assert through_pool.num_requests == directly.num_requests > 20
    assert (through_pool.num_handed_over, directly.num_handed_over) == (0, directly.num_requests)
    assert directly.second_p50_s < through_pool.second_p50_s
    assert not directly.loaded_gb and through_pool.loaded_gb
    lines = page([through_pool, directly], 40.0).splitlines()
    assert lines[-1].startswith(
        f"| {case.name} | directly | {directly.num_requests} | {directly.num_requests} |"
    )
