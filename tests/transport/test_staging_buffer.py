from __future__ import annotations

import pytest

from alignedserve.transport.completions import Completions
from alignedserve.transport.staging_buffer import NotStaged, StagingBuffer
from alignedserve.types import Epoch, RequestKey
from tests.transport.helpers import Outcomes, block_ids

ONE, TWO = RequestKey(1), RequestKey(2)


@pytest.fixture
def completions() -> Completions:
    return Completions()


@pytest.fixture
def outcomes() -> Outcomes:
    return Outcomes()


@pytest.fixture
def staging_buffer(completions: Completions, outcomes: Outcomes) -> StagingBuffer:
    staging_buffer = StagingBuffer(Epoch(1), completions)
    staging_buffer.put(ONE, block_ids(4, 5), outcomes.append)
    staging_buffer.put(TWO, block_ids(9), outcomes.append)
    return staging_buffer


def test_what_was_pulled_leaves_the_buffer(
    staging_buffer: StagingBuffer, completions: Completions, outcomes: Outcomes
) -> None:
    assert staging_buffer.begin_pull([TWO, ONE], [1, 2]) == [9, 4, 5]
    assert completions.run() == 0
    staging_buffer.finish_pull([TWO, ONE])
    completions.run()
    assert [(outcome.what, outcome.keys, outcome.error) for outcome in outcomes] == [
        ("send", (TWO,), None),
        ("send", (ONE,), None),
    ]
    assert len(staging_buffer) == staging_buffer.num_being_pulled == 0


def test_what_was_not_pulled_can_be_pulled_again(
    staging_buffer: StagingBuffer, completions: Completions
) -> None:
    staging_buffer.begin_pull([ONE], [2])
    staging_buffer.cancel_pull([ONE])
    assert completions.run() == 0
    assert staging_buffer.begin_pull([ONE], [2]) == [4, 5]


@pytest.mark.parametrize(
    ("keys", "num_blocks", "why"),
    [
        ([ONE, RequestKey(3)], [2, 1], "request 3 is not staged"),
        ([TWO, ONE], [1, 3], "request 1: 2 blocks staged, 3 asked for"),
        ([ONE, ONE], [2, 2], "2 requests asked for, 1 different ones"),
    ],
)
def test_what_cannot_be_pulled_whole_is_not_pulled(
    staging_buffer: StagingBuffer, keys: list[RequestKey], num_blocks: list[int], why: str
) -> None:
    with pytest.raises(NotStaged, match=why):
        staging_buffer.begin_pull(keys, num_blocks)
    assert staging_buffer.num_being_pulled == 0


def test_nothing_is_pulled_twice_at_a_time(staging_buffer: StagingBuffer) -> None:
    staging_buffer.begin_pull([ONE], [2])
    with pytest.raises(NotStaged, match="request 1 is being pulled already"):
        staging_buffer.begin_pull([TWO, ONE], [1, 2])
    assert staging_buffer.begin_pull([TWO], [1]) == [9]


def test_withdrawing_gives_the_blocks_back_at_once(
    staging_buffer: StagingBuffer, completions: Completions, outcomes: Outcomes
) -> None:
    staging_buffer.withdraw(ONE)
    staging_buffer.withdraw(ONE)
    completions.run()
    assert (outcomes.only.keys, outcomes.only.error) == ((ONE,), "withdrawn")
    assert len(staging_buffer) == 1


@pytest.mark.parametrize(("arrives", "error"), [(True, None), (False, "withdrawn")])
def test_what_is_being_pulled_is_withdrawn_when_that_ends(
    staging_buffer: StagingBuffer,
    completions: Completions,
    outcomes: Outcomes,
    arrives: bool,
    error: str | None,
) -> None:
    staging_buffer.begin_pull([ONE], [2])
    staging_buffer.withdraw(ONE)
    assert completions.run() == 0
    end = staging_buffer.finish_pull if arrives else staging_buffer.cancel_pull
    end([ONE])
    completions.run()
    assert outcomes.only.error == error
    assert len(staging_buffer) == 1


def test_what_is_withdrawn_is_not_pulled_again(staging_buffer: StagingBuffer) -> None:
    staging_buffer.begin_pull([ONE], [2])
    staging_buffer.withdraw(ONE)
    with pytest.raises(NotStaged, match="not staged"):
        staging_buffer.begin_pull([ONE], [2])


def test_clearing_withdraws_everything(
    staging_buffer: StagingBuffer, completions: Completions, outcomes: Outcomes
) -> None:
    staging_buffer.clear()
    completions.run()
    assert outcomes.errors == ["withdrawn"] * 2
    assert len(staging_buffer) == 0


def test_a_request_is_put_once(staging_buffer: StagingBuffer, outcomes: Outcomes) -> None:
    with pytest.raises(RuntimeError, match="request 1 is in the staging buffer already"):
        staging_buffer.put(ONE, block_ids(7), outcomes.append)
