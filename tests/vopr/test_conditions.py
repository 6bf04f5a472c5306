"""What goes wrong with copies goes wrong with those of its kind, until it ends."""

from __future__ import annotations

import pytest

from alignedserve.sim.clock import Clock
from alignedserve.types import RequestKey
from alignedserve.vopr.conditions import Conditions
from alignedserve.vopr.history import FailingCopies, SlowCopies
from alignedserve.vopr.plan import make_plan

KINDS = ("load", "save", "pull")
KEY = RequestKey(1)


@pytest.fixture
def conditions() -> Conditions:
    return Conditions(make_plan(1), Clock())


@pytest.mark.parametrize("kind", KINDS)
def test_copies_of_one_kind_are_slow(conditions: Conditions, kind: str) -> None:
    conditions.add(SlowCopies(at_s=0.0, slowdown=5.0, seconds=1.0, what=kind))
    assert {each: conditions.copy_slowdown(each) for each in KINDS} == dict.fromkeys(KINDS, 1.0) | {kind: 5.0}


@pytest.mark.parametrize("kind", KINDS)
def test_copies_of_one_kind_fail(conditions: Conditions, kind: str) -> None:
    conditions.add(FailingCopies(at_s=0.0, rate=1.0, seconds=1.0, what=kind))
    assert [each for each in KINDS if conditions.copy_share(each, KEY) is not None] == [kind]


def test_all_copies_are_slow_and_fail_until_it_ends() -> None:
    clock = Clock()
    conditions = Conditions(make_plan(1), clock)
    conditions.add(SlowCopies(at_s=0.0, slowdown=5.0, seconds=1.0))
    conditions.add(FailingCopies(at_s=0.0, rate=1.0, seconds=1.0))
    for each in KINDS:
        assert conditions.copy_slowdown(each) == 5.0 and conditions.copy_share(each, KEY) is not None
    clock.run_until(1.0)
    for each in KINDS:
        assert conditions.copy_slowdown(each) == 1.0 and conditions.copy_share(each, KEY) is None
