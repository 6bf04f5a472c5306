from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.instance.profile.fit_copies import Copied, fit_channel
from alignedserve.instance.profile.restoring import Restored, fit_restoring
from alignedserve.timing.cost import CopyChannel

SIZES = [4 << 10, 64 << 10, 1 << 20, 16 << 20]
KNOWN = CopyChannel(latency_s=2e-5, bytes_per_s=5e9)


def copies_by(channel: CopyChannel, noise: float = 0.0, num_each: int = 5) -> list[Copied]:
    choose = random.Random(0)
    return [
        Copied(size, channel.seconds(size) * choose.uniform(1 - noise, 1 + noise))
        for _ in range(num_each)
        for size in SIZES
    ]


@pytest.mark.parametrize(
    "known", [KNOWN, CopyChannel(1e-6, 5e10), CopyChannel(1e-3, 1e8), CopyChannel(0.0, 1e9)], ids=str
)
def test_a_channel_is_found_again(known: CopyChannel) -> None:
    found = fit_channel(copies_by(known))
    assert found.latency_s == pytest.approx(known.latency_s, rel=1e-3, abs=1e-9)
    assert found.bytes_per_s == pytest.approx(known.bytes_per_s, rel=1e-3)


def test_noise_of_a_tenth_moves_it_by_less() -> None:
    found = fit_channel(copies_by(KNOWN, noise=0.1))
    assert found.latency_s == pytest.approx(KNOWN.latency_s, rel=0.1)
    assert found.bytes_per_s == pytest.approx(KNOWN.bytes_per_s, rel=0.1)


def test_interruptions_leave_it_as_it_was() -> None:
    """Four of five copies of each size take a hundred times as long."""
    copies = [
        Copied(each.num_bytes, each.seconds * (1 if index // len(SIZES) == 3 else 100))
        for index, each in enumerate(copies_by(KNOWN))
    ]
    found = fit_channel(copies)
    assert found.latency_s == pytest.approx(KNOWN.latency_s, rel=1e-3)
    assert found.bytes_per_s == pytest.approx(KNOWN.bytes_per_s, rel=1e-3)


def test_of_one_size_all_of_the_time_is_the_rate_s() -> None:
    found = fit_channel([Copied(1000, 0.5), Copied(1000, 0.1), Copied(1000, 0.2)])
    assert found == CopyChannel(0.0, 10_000.0)


def test_where_more_bytes_take_no_longer_the_largest_copy_says_the_rate() -> None:
    assert fit_channel([Copied(100, 0.2), Copied(1000, 0.1)]) == CopyChannel(0.0, 10_000.0)
    assert fit_channel([Copied(100, 0.1), Copied(1000, 0.0)]).bytes_per_s == pytest.approx(1e12)


def test_without_copies_there_is_no_fit() -> None:
    with pytest.raises(ValueError, match="no copies"):
        fit_channel([])


@given(st.lists(st.tuples(st.integers(1, 10**9), st.floats(0, 1e4)), min_size=1, max_size=20))
def test_whatever_is_measured_a_copy_takes_a_time(measured: list[tuple[int, float]]) -> None:
    found = fit_channel([Copied(*each) for each in measured])
    assert 0 < found.bytes_per_s < math.inf and 0 <= found.latency_s < math.inf
    assert 0 < found.seconds(1 << 20) < math.inf


# ---- restoring ----


def test_seconds_per_restored_token_are_found_again_without_what_any_iteration_has() -> None:
    points = [Restored(count, 3e-4 + 2e-6 * count) for count in (16, 64, 256, 1024)]
    assert fit_restoring(points) == pytest.approx(2e-6)
    assert fit_restoring(points[:1]) == pytest.approx((3e-4 + 2e-6 * 16) / 16)


def test_an_iteration_that_was_shorter_by_chance_counts_for_nothing() -> None:
    points = [Restored(count, 2e-6 * count) for count in (64, 256, 1024)]
    assert fit_restoring([Restored(16, -1e-4), *points]) == pytest.approx(2e-6)
    assert fit_restoring([Restored(16, -1e-4), Restored(64, 0.0)]) > 0
    assert fit_restoring([]) > 0


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(-10, 10)), max_size=20))
def test_whatever_is_measured_restoring_takes_a_time(measured: list[tuple[int, float]]) -> None:
    assert 0 < fit_restoring([Restored(*each) for each in measured]) < math.inf
