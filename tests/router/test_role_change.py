"""An instance changes its role: its requests first continue elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from alignedserve.protocol.messages import AnyMessage, Candidates, Evict, Offer, Prefill, Reserve, TakeRole
from alignedserve.router.events import Connected
from alignedserve.router.requests import Phase
from alignedserve.scheduling.proportion import Proportion
from alignedserve.types import InstanceId, RequestKey
from tests.router.script import DECODE, ONE, POOL, PREFILL, Script, decode_report, hello

OTHER_PREFILL, OTHER_DECODE = InstanceId("prefill-1"), InstanceId("decode-1")


class Wanted:
    """The role that one of the others should take, as a test has it."""

    role: str | None = None


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> Wanted:
    wanted = Wanted()
    monkeypatch.setattr(Proportion, "wanted", lambda self, seen: wanted.role)
    return wanted


class Four(Script):
    """Two instances of each role."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"change_roles": True} | options)
        for name in (OTHER_PREFILL, OTHER_DECODE):
            self.connect(name)
        self.take()

    def told(self) -> list[tuple[str, str]]:
        """Who was told since the last time, and what."""
        return [(name, message.role) for name, message in self.take() if isinstance(message, TakeRole)]

    def becomes(self, name: InstanceId, role: str) -> None:
        """To the router that is another process, of the same name."""
        self.close(name)
        self._on(Connected(replace(hello(name, epoch=2), role=role)))

    def names(self) -> tuple[list[str], list[str]]:
        cluster = self.router.state.cluster
        return (
            [view.instance_id for view in cluster.prefills],
            [view.instance_id for view in cluster.decodes],
        )


def of_kind(sent: list[tuple[str, AnyMessage]], kind: type[Any]) -> list[str]:
    """To whom messages of this kind were sent."""
    return [name for name, message in sent if isinstance(message, kind)]


def test_one_that_has_nothing_to_do_is_told_at_once(wanted: Wanted) -> None:
    script = Four()
    wanted.role = "decode"
    script.tick(1.0)
    assert script.told() == [(PREFILL, "decode")]
    assert script.names() == ([OTHER_PREFILL], [DECODE, OTHER_DECODE])
    script.tick(1.0)
    assert script.told() == [], "one at a time"
    assert not script.router.is_idle
    wanted.role = None
    script.becomes(PREFILL, "decode")
    assert script.names() == ([OTHER_PREFILL], [DECODE, OTHER_DECODE, PREFILL])
    assert script.router.state.counters.role_changes == {"decode": 1}
    assert script.router.is_idle


def test_by_default_nobody_changes(wanted: Wanted) -> None:
    script = Four(change_roles=False)
    wanted.role = "decode"
    script.tick(1.0)
    assert script.told() == []


def test_a_prefill_instance_computes_what_it_has_and_gets_nothing_new(wanted: Wanted) -> None:
    script = Four()
    for key in (1, 2, 3, 4):
        script.submit(key)
        script.reserve(key, [10 * key, 10 * key + 1])
    at: dict[str, list[int]] = {PREFILL: [], OTHER_PREFILL: []}
    for name, message in script.take():
        if isinstance(message, Prefill):
            at[name] += [work.request.key for work in message.works]
    assert all(len(keys) == 2 for keys in at.values())
    wanted.role = "decode"
    script.tick(1.0)
    assert script.names()[0] == [OTHER_PREFILL]
    script.submit(5)
    script.reserve(5, [50, 51])
    assert of_kind(script.take(), Prefill) == [OTHER_PREFILL]
    first, last = at[PREFILL]
    for key in (first, last):
        assert script.told() == []
        script.first_token(key, sender=PREFILL)
        script.saved(key, sender=PREFILL)
    assert script.told() == [(PREFILL, "decode")]


def test_what_runs_at_a_decode_instance_goes_on_at_the_other(wanted: Wanted) -> None:
    script = Four()
    script.running()
    script.take()
    script.say(OTHER_DECODE, decode_report(num_running=0))
    view = script.router.state.cluster.decode(OTHER_DECODE)
    assert view
    view.running.update({RequestKey(8): None, RequestKey(9): None})
    wanted.role = "prefill"
    script.tick(1.0)
    sent = script.take()
    assert of_kind(sent, Reserve) == [POOL] and not of_kind(sent, TakeRole)
    assert script.state().phase is Phase.MAKING_ROOM
    script.reserve()
    assert of_kind(script.take(), Evict) == [DECODE]
    script.decode(evicted=[(ONE, 6)], num_running=0)
    sent = script.take()
    assert of_kind(sent, TakeRole) == [DECODE]
    assert not [name for name in of_kind(sent, Offer) if name == DECODE]
    assert script.state().instance_id != DECODE


def test_candidates_that_the_pool_finds_for_one_that_leaves_stay_in_the_pool(wanted: Wanted) -> None:
    script = Four()
    script.pooled()
    script.take()
    wanted.role = "prefill"
    script.tick(1.0)
    assert script.told() == [(DECODE, "prefill")]
    script.say(POOL, Candidates(DECODE, [ONE], True))
    assert DECODE not in of_kind(script.take(), Offer)
    assert script.state().phase is Phase.POOLED


def test_it_stays_as_it_is_if_the_last_other_one_dies(wanted: Wanted) -> None:
    script = Four()
    script.submit()
    script.reserve()
    (busy,) = of_kind(script.take(), Prefill)
    script.submit(2)
    script.reserve(2, [20, 21])
    wanted.role = "decode"
    script.tick(1.0)
    (left,) = script.names()[0]
    wanted.role = None
    script.close(left)
    (back,) = script.names()[0]
    assert {left, back} == {PREFILL, OTHER_PREFILL}
    assert script.told() == []
    assert script.router.state.counters.role_changes == {}
    assert busy in (left, back)


@pytest.mark.parametrize("is_told", [False, True])
def test_it_dies_meanwhile_and_comes_back_as_it_was(wanted: Wanted, is_told: bool) -> None:
    script = Four()
    if not is_told:
        for key in (1, 2):
            script.submit(key)
            script.reserve(key, [10 * key, 10 * key + 1])
    wanted.role = "decode"
    script.tick(1.0)
    assert script.told() == ([(PREFILL, "decode")] if is_told else [])
    wanted.role = None
    (changing,) = {PREFILL, OTHER_PREFILL} - {*script.names()[0]}
    script.close(changing)
    script.connect(changing, epoch=2)
    assert sorted(script.names()[0]) == [PREFILL, OTHER_PREFILL]
    script.tick(1.0)
    assert not script.told()
