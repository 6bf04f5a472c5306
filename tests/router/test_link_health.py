"""Pairs with failing pulls use host memory, and return to their link once it has been proved to work."""

from __future__ import annotations

from itertools import pairwise

import pytest

from alignedserve.protocol.messages import Failed, FailedPull, Gone, NewTokens, Offer, Stage, Unstage
from alignedserve.router.clock import EventClock
from alignedserve.router.link_health import FIRST_PAUSE_S, MAX_PAUSE_S, LinkHealth
from alignedserve.router.status import describe
from alignedserve.router.views import PrefillView
from alignedserve.types import InstanceId, RequestKey
from tests.router.script import DECODE, PREFILL, Script, hello, prefill_report

OTHER_PREFILL, OTHER_DECODE = InstanceId("prefill-1"), InstanceId("decode-1")
A, B, C = map(RequestKey, (1, 2, 3))


class Links:
    """The decision alone, among two prefill instances and their decode instances."""

    def __init__(self) -> None:
        self.clock = EventClock()
        self.health = LinkHealth(self.clock)
        self.views = {name: PrefillView(hello(name)) for name in (PREFILL, OTHER_PREFILL)}

    def may_stage(self, stager: InstanceId = PREFILL, decode: InstanceId = DECODE) -> bool:
        return self.health.may_stage(self.views[stager], decode)

    def stage(self, key: RequestKey) -> None:
        assert self.may_stage()
        self.health.staged(PREFILL, DECODE, key)
        self.views[PREFILL].staging[key] = 1

    def unstage(self, key: RequestKey) -> None:
        del self.views[PREFILL].staging[key]

    def fail(self, *keys: RequestKey, source: InstanceId = PREFILL) -> None:
        """In one transfer, and then there is a tick."""
        self.health.failed(DECODE, FailedPull(source, [*keys], "reset"))
        self.health.tick()

    def fail_twice(self) -> None:
        self.fail(A)
        self.fail(A)

    def succeed(self, key: RequestKey) -> None:
        self.health.succeeded(PREFILL, DECODE, key)

    @property
    def over_host(self) -> list[InstanceId]:
        return self.health.over_host(DECODE)


def test_two_failures_in_a_row_and_only_of_one_pair() -> None:
    links = Links()
    links.fail(A)
    assert links.may_stage() and not links.over_host
    links.fail(B)
    assert not links.may_stage() and links.over_host == [PREFILL]
    assert links.may_stage(OTHER_PREFILL) and links.may_stage(decode=OTHER_DECODE)
    assert links.health.over_host(OTHER_DECODE) == []


def test_a_success_between_them_makes_no_row() -> None:
    links = Links()
    for _ in range(3):
        links.fail(A)
        links.succeed(B)
    assert links.may_stage() and links.health.take_remarks() == []


def test_what_fails_at_once_fails_once() -> None:
    links = Links()
    for key in (A, B, C):
        links.health.failed(DECODE, FailedPull(PREFILL, [key], "reset"))
    links.health.tick()
    assert links.may_stage()
    links.health.tick()
    assert links.may_stage(), "no news is no failure"
    links.fail(A)
    assert not links.may_stage()


def test_after_a_pause_it_is_tried_with_one_request() -> None:
    links = Links()
    links.fail_twice()
    links.clock.now = FIRST_PAUSE_S - 0.1
    assert not links.may_stage()
    links.clock.now = FIRST_PAUSE_S
    links.stage(B)
    assert not links.may_stage(), "one at a time"
    assert links.health.may_pull(PREFILL, DECODE, B) and not links.health.may_pull(PREFILL, DECODE, A)
    links.succeed(B)
    assert links.may_stage() and not links.over_host
    links.fail(A)
    assert links.may_stage(), "it starts anew"


def test_each_failure_doubles_the_pause_up_to_its_most() -> None:
    links = Links()
    links.fail_twice()
    tried_s = [0.0]
    while len(tried_s) < 8:
        links.clock.now = tried_s[-1] + 1.0
        while not links.may_stage():
            links.clock.now += 1.0
        links.stage(A)
        links.fail(A)
        links.unstage(A)
        tried_s.append(links.clock.now)
    pauses = [after - before for before, after in pairwise(tried_s)]
    assert pauses == [30, 60, 120, 240, 480, 600, 600] and MAX_PAUSE_S == 600


def test_a_trial_that_says_nothing_is_followed_by_another() -> None:
    """Its client left before it was pulled, for instance."""
    links = Links()
    links.fail_twice()
    links.clock.now = FIRST_PAUSE_S
    links.stage(A)
    assert not links.may_stage()
    links.unstage(A)
    links.stage(B)
    assert links.over_host == [PREFILL]


def test_what_was_under_way_neither_restores_nor_worsens_it() -> None:
    links = Links()
    links.fail_twice()
    links.succeed(B)
    assert links.over_host == [PREFILL]
    links.fail(B)
    links.clock.now = FIRST_PAUSE_S
    links.stage(C)
    links.fail(B)
    links.succeed(C)
    assert not links.over_host


@pytest.mark.parametrize("gone", [PREFILL, DECODE])
def test_a_new_start_of_either_forgets(gone: InstanceId) -> None:
    links = Links()
    links.fail_twice()
    links.health.forget(OTHER_PREFILL)
    links.health.forget(OTHER_DECODE)
    assert links.over_host == [PREFILL]
    links.health.forget(gone)
    assert links.may_stage() and not links.over_host
    links.fail(A)
    links.health.failed(DECODE, FailedPull(PREFILL, [A], "reset"))
    links.health.forget(gone)
    links.health.tick()
    assert links.may_stage(), "it had not been counted yet"


def test_each_change_is_remarked_once() -> None:
    links = Links()
    links.fail_twice()
    (left,) = links.health.take_remarks()
    assert left == (
        "KV goes from prefill-0 to decode-0 through host memory: 2 pulls over the link failed in a row, the last "
        "because of 'reset'; it is tried again in 30 s"
    )
    links.clock.now = FIRST_PAUSE_S
    links.stage(A)
    links.fail(A)
    links.unstage(A)
    assert links.health.take_remarks() == []
    links.clock.now += 2 * FIRST_PAUSE_S
    links.stage(B)
    links.succeed(B)
    assert links.health.take_remarks() == ["KV goes from prefill-0 to decode-0 over the link again"]


# ---- in the router ---------------------------------------------------------------------------------------------------


def staged(script: Script, *keys: int) -> None:
    script.say(PREFILL, prefill_report(staged=[RequestKey(key) for key in keys]))


def fail_pull(script: Script, *keys: int, source: InstanceId = PREFILL) -> None:
    """As a decode instance says it, until the router has them in the pool again and has chosen a way for them."""
    found = [RequestKey(key) for key in keys]
    script.decode(failed_pulls=[FailedPull(source, found, "connection reset")])
    for key in found:
        script.say(DECODE, Failed(key, "pull", "connection reset"))
    script.tick(0.1)
    for key in found:
        script.say(PREFILL, Gone([key]))
    script.chosen(*keys)


def on_the_link(*keys: int) -> Script:
    """These have been staged, and offered."""
    script = Script(link="ipc")
    for key in keys:
        script.pooled(key)
    script.chosen(*keys)
    staged(script, *keys)
    script.take()
    return script


def over_host(*keys: int) -> Script:
    script = on_the_link(*keys)
    fail_pull(script, *keys)
    staged(script, *keys)
    fail_pull(script, *keys)
    return script


def ways(script: Script) -> list[str]:
    """What decode instances were offered, and what was to be staged."""
    return [
        f"offer from {message.source}" if isinstance(message, Offer) else "stage"
        for _, message in script.take()
        if isinstance(message, Offer | Stage)
    ]


def test_after_two_failures_it_is_fetched_from_the_pool() -> None:
    script = on_the_link(1, 2)
    fail_pull(script, 1, 2)
    assert ways(script) == ["stage"]
    staged(script, 1, 2)
    assert ways(script) == ["offer from prefill-0"]
    fail_pull(script, 1, 2)
    assert ways(script) == ["offer from None"]
    script.decode(admitted=[A, B])
    assert script.router.state.link_health.over_host(DECODE) == [PREFILL], "that came from the pool"
    for key in (1, 2):
        script.token(key, finish_reason="stop")
    script.router.check_idle()


def test_another_prefill_instance_stages_what_one_cannot_hand_over() -> None:
    script = on_the_link(1)
    script.connect(OTHER_PREFILL, num_staging_blocks=10)
    fail_pull(script, 1)
    staged(script, 1)
    script.take()
    fail_pull(script, 1)
    assert script.take_one(Stage, OTHER_PREFILL).works[0].request.key == 1


def test_it_is_tried_with_one_request_and_proves_itself() -> None:
    script = over_host(1)
    script.decode(admitted=[A])
    script.tick(FIRST_PAUSE_S)
    for key in (2, 3):
        script.pooled(key)
    script.take()
    script.chosen(2, 3)
    sent = [message for _, message in script.take() if isinstance(message, Offer | Stage)]
    assert [(type(each), [work.request.key for work in each.works]) for each in sent] == [
        (Stage, [2]),
        (Offer, [3]),
    ]
    staged(script, 2)
    assert ways(script) == ["offer from prefill-0"]
    script.decode(admitted=[B, C])
    assert script.router.state.link_health.over_host(DECODE) == []
    assert script.router.take_remarks()[-1] == "KV goes from prefill-0 to decode-0 over the link again"


def test_what_is_staged_when_its_link_fails_is_fetched_from_the_pool() -> None:
    script = on_the_link(1)
    fail_pull(script, 1)
    staged(script, 1)
    script.pooled(2)
    script.chosen(2)
    fail_pull(script, 1)
    script.take()
    staged(script, 2)
    sent = script.take()
    (offer,) = [message for _, message in sent if isinstance(message, Offer)]
    assert (offer.source, [work.request.key for work in offer.works]) == (None, [2])
    assert (PREFILL, Unstage([B])) in sent
    assert script.router.state.cluster.prefills[0].staging == {}  # type: ignore[union-attr]


def test_the_death_of_a_stager_is_no_failure_of_its_link() -> None:
    script = on_the_link(1)
    script.decode(failed_pulls=[FailedPull(PREFILL, [A], "gone")])
    script.close(PREFILL)
    script.decode(failed_pulls=[FailedPull(PREFILL, [A], "gone")])
    script.tick(0.1)
    script.connect(PREFILL, epoch=2)
    script.decode(failed_pulls=[FailedPull(PREFILL, [A], "gone")])
    script.tick(0.1)
    health = script.router.state.link_health
    health.failed(DECODE, FailedPull(PREFILL, [B], "reset"))
    health.tick()
    assert health.over_host(DECODE) == [], "that was the first of the new start"


def test_what_failed_is_counted_and_said() -> None:
    script = over_host(1)
    connected = [process.hello for process in script.router.state.cluster]
    cluster = describe(script.router, hello("router"), connected, {}, None, ticket=1)
    stats = {process.instance_id: process.stats for process in cluster.processes}
    assert (stats[DECODE].num_failed_pulls, stats[DECODE].over_host) == (2, [PREFILL])
    assert (stats[PREFILL].num_failed_pulls, stats[PREFILL].over_host) == (0, [])
    (remark,) = script.router.take_remarks()
    assert "from prefill-0 to decode-0 through host memory" in remark and "'connection reset'" in remark
    script.decode(admitted=[A], news=[NewTokens(A, 1, [7], finish_reason="stop")])
    script.router.check_idle()
