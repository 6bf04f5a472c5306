"""Islands are lent from test to test, and a test that fails spoils the one that it had."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from alignedserve.kvpool.process import segments
from tests.cluster.client import connected
from tests.cluster.conftest import FAMILY, Directory
from tests.cluster.islands import MOST, Islands
from tests.cluster.processes import COLOCATED, Processes, Setup
from tests.inner_pytest import run_pytest

SHAKY = """
import asyncio

from tests.cluster.client import connected
from tests.cluster.processes import ROUTER

PIDS = []

async def until_up(processes):
    async with connected(processes):
        pass

def test_shaky(borrow, request):
    processes = borrow(num_colocated=1)
    PIDS.append(processes.pid(ROUTER))
    assert request.node.execution_count == 2, "the first time"
    asyncio.run(until_up(processes))

def test_steady(borrow):
    first, second = PIDS
    assert borrow(num_colocated=1).pid(ROUTER) == second != first
"""


async def until_up(processes: Processes) -> None:
    async with connected(processes):
        pass


def kinds(tiny_model: Directory) -> list[Setup]:
    """One more than there is room for."""
    return [Setup(tiny_model(FAMILY), num_colocated=1, silence_s=10.0 + each) for each in range(MOST + 1)]


@pytest.mark.slow
def test_one_is_lent_again_until_others_take_its_place(tiny_model: Directory, tmp_path: Path) -> None:
    islands, setups = Islands(lambda: tmp_path, []), kinds(tiny_model)
    try:
        lent = [islands.borrow(each) for each in setups[:MOST]]
        for each in lent:
            asyncio.run(until_up(each))
        assert islands.borrow(setups[0]) is lent[0]
        islands.borrow(setups[MOST])
        # The one that was not borrowed for longest has ended.
        assert islands.borrow(setups[0]) is lent[0]
        assert segments(lent[0].segment_prefix) and not segments(lent[1].segment_prefix)
    finally:
        islands.clean_up()


@pytest.mark.slow
def test_one_that_does_not_end_as_it_should_fails_all_later_tests(
    tiny_model: Directory, tmp_path: Path
) -> None:
    not_ended: list[str] = []
    islands, (first, *others) = Islands(lambda: tmp_path, not_ended), kinds(tiny_model)
    try:
        lent = islands.borrow(first)
        asyncio.run(until_up(lent))
        for each in others[1:]:
            islands.borrow(each)
        lent.kill(COLOCATED)
        with pytest.raises(AssertionError, match=r"exit codes: \{.colocated-0.: -9\}"):
            islands.borrow(others[0])
        # Its second run, and that of a file's last test, which has others.
        for lender in (islands, Islands(lambda: tmp_path, not_ended)):
            with pytest.raises(AssertionError, match="did not end as they should.*colocated-0.*-9"):
                lender.borrow(others[0])
    finally:
        islands.clean_up()


@pytest.mark.slow
def test_one_whose_process_has_died_is_not_lent_again(tiny_model: Directory, tmp_path: Path) -> None:
    islands, (setup, *_) = Islands(lambda: tmp_path, []), kinds(tiny_model)
    try:
        lent = islands.borrow(setup)
        asyncio.run(until_up(lent))
        lent.kill(COLOCATED)
        with pytest.raises(AssertionError, match=r"died while no test had them: \{'colocated-0': -9\}"):
            islands.borrow(setup)
        assert not segments(lent.segment_prefix)
        assert islands.borrow(setup) is not lent
    finally:
        islands.clean_up()


@pytest.mark.slow
def test_one_that_cannot_wait_ends_when_it_is_given_back(tiny_model: Directory, tmp_path: Path) -> None:
    islands, setup = Islands(lambda: tmp_path, []), Setup(tiny_model(FAMILY), num_colocated=1, silence_s=2.0)
    try:
        lent = islands.borrow(setup)
        asyncio.run(until_up(lent))
        islands.give_back(lent)
        assert set(lent.dead.values()) == {0}
        assert islands.borrow(setup) is not lent
    finally:
        islands.clean_up()


@pytest.mark.slow
@pytest.mark.drawn(one_in=8)
def test_a_second_run_has_another_one(tmp_path: Path) -> None:
    code, said = run_pytest(tmp_path, {"cluster/test_a.py": SHAKY}, "-p", "tests.cluster.conftest")
    assert code == 0 and "FLAKY" in said, said
