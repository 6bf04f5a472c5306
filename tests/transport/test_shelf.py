from __future__ import annotations

import pytest

from alignedserve.transport.completions import Completions
from alignedserve.transport.shelf import NotOnShelf, Shelf
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
def shelf(completions: Completions, outcomes: Outcomes) -> Shelf:
    shelf = Shelf(Epoch(1), completions)
    shelf.put(ONE, block_ids(4, 5), outcomes.append)
    shelf.put(TWO, block_ids(9), outcomes.append)
    return shelf


def test_what_was_pulled_leaves_the_shelf(shelf: Shelf, completions: Completions, outcomes: Outcomes) -> None:
    assert shelf.lend([TWO, ONE], [1, 2]) == [9, 4, 5]
    assert completions.run() == 0
    shelf.pulled([TWO, ONE])
    completions.run()
    assert [(outcome.what, outcome.keys, outcome.error) for outcome in outcomes] == [
        ("lend", (TWO,), None),
        ("lend", (ONE,), None),
    ]
    assert len(shelf) == shelf.num_lent == 0


def test_what_was_not_pulled_can_be_pulled_again(shelf: Shelf, completions: Completions) -> None:
    shelf.lend([ONE], [2])
    shelf.put_back([ONE])
    assert completions.run() == 0
    assert shelf.lend([ONE], [2]) == [4, 5]


@pytest.mark.parametrize(
    ("keys", "num_blocks", "why"),
    [
        ([ONE, RequestKey(3)], [2, 1], "request 3 is not staged"),
        ([TWO, ONE], [1, 3], "request 1: 2 blocks staged, 3 asked for"),
        ([ONE, ONE], [2, 2], "2 requests asked for, 1 different ones"),
    ],
)
def test_what_cannot_be_lent_whole_is_not_lent(
    shelf: Shelf, keys: list[RequestKey], num_blocks: list[int], why: str
) -> None:
    with pytest.raises(NotOnShelf, match=why):
        shelf.lend(keys, num_blocks)
    assert shelf.num_lent == 0


def test_nothing_is_lent_twice_at_a_time(shelf: Shelf) -> None:
    shelf.lend([ONE], [2])
    with pytest.raises(NotOnShelf, match="request 1 is being pulled already"):
        shelf.lend([TWO, ONE], [1, 2])
    assert shelf.lend([TWO], [1]) == [9]


def test_withdrawing_gives_the_blocks_back_at_once(
    shelf: Shelf, completions: Completions, outcomes: Outcomes
) -> None:
    shelf.withdraw(ONE)
    shelf.withdraw(ONE)
    completions.run()
    assert (outcomes.only.keys, outcomes.only.error) == ((ONE,), "withdrawn")
    assert len(shelf) == 1


@pytest.mark.parametrize(("arrives", "error"), [(True, None), (False, "withdrawn")])
def test_what_is_being_pulled_is_withdrawn_when_that_ends(
    shelf: Shelf, completions: Completions, outcomes: Outcomes, arrives: bool, error: str | None
) -> None:
    shelf.lend([ONE], [2])
    shelf.withdraw(ONE)
    assert completions.run() == 0
    end = shelf.pulled if arrives else shelf.put_back
    end([ONE])
    completions.run()
    assert outcomes.only.error == error
    assert len(shelf) == 1


def test_what_is_withdrawn_is_not_lent_again(shelf: Shelf) -> None:
    shelf.lend([ONE], [2])
    shelf.withdraw(ONE)
    with pytest.raises(NotOnShelf, match="not staged"):
        shelf.lend([ONE], [2])


def test_clearing_withdraws_everything(shelf: Shelf, completions: Completions, outcomes: Outcomes) -> None:
    shelf.clear()
    completions.run()
    assert outcomes.errors == ["withdrawn"] * 2
    assert len(shelf) == 0


def test_a_request_is_put_once(shelf: Shelf, outcomes: Outcomes) -> None:
    with pytest.raises(RuntimeError, match="request 1 is on the shelf already"):
        shelf.put(ONE, block_ids(7), outcomes.append)
