"""Processes die at any time, and requests continue with what is left of them."""

from __future__ import annotations

import pytest

from alignedserve.protocol.messages import (
    Abort,
    Commit,
    MakeSpare,
    Offer,
    Prefill,
    Release,
    Reserve,
    Reserved,
    Stored,
    Submit,
    Tokens,
    UsePool,
    Welcome,
)
from alignedserve.router.requests import Phase
from alignedserve.types import PoolBlockId, RequestKey
from tests.router.script import DECODE, GATEWAY, ONE, POOL, PREFILL, Script, request

BLOCKS = [PoolBlockId(10), PoolBlockId(11)]


def test_a_decode_instance_dies_and_the_spare_copy_saves_its_prompt() -> None:
    script = Script()
    script.running()
    script.token()
    script.take()
    script.close(DECODE)
    assert script.take_reserve() == (ONE, 8)
    script.reserve()
    work = script.take_one(Prefill, PREFILL).works[0]
    assert (work.num_cached, work.output) == (6, [50, 60])
    script.first_token(token=70)
    assert script.take_one(Tokens, GATEWAY).news[0].first == 2


def test_a_decode_instance_dies_after_the_spare_copy_was_dropped() -> None:
    script = Script()
    script.running()
    script.say(POOL, Reserved(RequestKey(9), None, dropped=[ONE]))
    script.take()
    script.close(DECODE)
    script.reserve()
    assert script.take_one(Prefill, PREFILL).works[0].num_cached == 0


def test_a_request_that_was_dropped_goes_on_with_what_the_pool_has() -> None:
    script = Script()
    script.running()
    script.token()
    script.take()
    script.decode(dropped=[ONE])
    assert script.take_reserve() == (ONE, 8)
    script.reserve()
    work = script.take_one(Prefill, PREFILL).works[0]
    assert (work.num_cached, work.output) == (6, [50, 60])


def two_that_lost_their_instance() -> Script:
    """Of best effort. Each has KV in the pool, and asks for room for the rest."""
    script = Script(policy="aligned")
    for key in (1, 2):
        script.running(key, tier="be")
        script.token(key)
    script.take()
    script.close(DECODE)
    return script


def test_two_that_lost_their_instance_do_not_ask_a_full_pool_by_turns() -> None:
    script = two_that_lost_their_instance()
    num_asked = 0
    while asked := [message for _, message in script.take() if isinstance(message, Reserve)]:
        num_asked += len(asked)
        assert num_asked < 20
        for each in asked:
            script.say(POOL, Reserved(each.key, None, number=each.number))
    # They ask again when there may be room.
    script.tick(0.1)
    asked = [message for _, message in script.take() if isinstance(message, Reserve)]
    assert {each.key for each in asked} == {ONE, RequestKey(2)}


def test_real_time_asks_for_what_best_effort_has_let_go_at_once() -> None:
    script = two_that_lost_their_instance()
    script.submit(3)
    asked = {message.key: message for _, message in script.take() if isinstance(message, Reserve)}
    assert asked.keys() == {ONE, RequestKey(2), RequestKey(3)}
    # When real time and the first one were refused, nothing was pinned.
    for key in (RequestKey(3), ONE):
        script.say(POOL, Reserved(key, None, number=asked[key].number))
        assert not [message for _, message in script.take() if isinstance(message, Reserve | MakeSpare)]
    script.say(POOL, Reserved(RequestKey(2), None, number=asked[RequestKey(2)].number))
    sent = [message for _, message in script.take() if isinstance(message, Reserve | MakeSpare)]
    assert sent[0] == MakeSpare([ONE])
    assert [message.key for message in sent[1:] if isinstance(message, Reserve)] == [
        RequestKey(2),
        RequestKey(3),
    ]


def test_room_that_was_asked_for_a_request_that_is_dropped_is_released() -> None:
    """Whether the pool has answered, or is about to."""
    for is_answered in (True, False):
        script = Script()
        script.running()
        script.say(POOL, Reserved(RequestKey(9), None, dropped=[ONE]))
        script.decode(wants_evicted=[ONE])
        if is_answered:
            script.reserve()
        script.take()
        script.decode(dropped=[ONE])
        kinds = [type(message) for name, message in script.take() if name == POOL]
        assert kinds[0] is Release
        script.reserve()
        assert script.take_one(Prefill, PREFILL).works[0].num_cached == 0


def test_what_was_only_offered_goes_back_to_the_candidates() -> None:
    script = Script()
    script.pooled()
    script.chosen(1)
    script.take()
    script.close(DECODE)
    commit = script.take_one(Commit, POOL)
    assert commit.is_candidate and script.state().phase is Phase.POOLED
    script.connect(DECODE, epoch=2)
    script.chosen(1)
    assert (DECODE, Offer) in [(to, type(message)) for to, message in script.take()]


@pytest.mark.parametrize("was", ["reserved", "sampled"])
def test_a_prefill_instance_dies(was: str) -> None:
    script = Script()
    script.submit()
    script.reserve()
    if was == "sampled":
        script.first_token()
    script.close(PREFILL)
    assert script.state().phase is Phase.QUEUED
    script.take()
    script.connect(PREFILL, epoch=2)
    assert Reserve in [type(message) for _, message in script.take()]
    script.reserve()
    assert script.take_one(Prefill, PREFILL).works[0].output == ([50] if was == "sampled" else [])


def test_a_second_death_while_the_first_is_recovered() -> None:
    script = Script()
    script.running()
    script.token()
    script.close(DECODE)
    script.reserve()
    script.close(PREFILL)
    script.connect(DECODE, epoch=2)
    script.connect(PREFILL, epoch=2)
    script.reserve()
    work = [message.works[0] for _, message in script.take() if isinstance(message, Prefill)][-1]
    assert (work.num_cached, work.output) == (6, [50, 60])


def test_the_stager_dies_with_its_copies() -> None:
    script = Script(link="gloo")
    script.pooled()
    script.chosen(1)
    script.close(PREFILL)
    assert script.state().phase is Phase.POOLED
    script.say(GATEWAY, Abort([ONE]))
    script.router.check_idle()


def test_an_abort_waits_for_the_dead() -> None:
    script = Script()
    script.running()
    script.say(GATEWAY, Abort([ONE]))
    script.take()
    script.close(DECODE)
    assert script.take_one(Release, POOL).keys == [ONE]
    script.router.check_idle()


def test_a_gateway_takes_its_requests_along() -> None:
    script = Script()
    script.running(1)
    script.pooled(2)
    script.take()
    script.close(GATEWAY)
    sent = script.take()
    assert (DECODE, Abort([ONE])) in sent and (POOL, Release([RequestKey(2)])) in sent
    script.gone(DECODE)
    script.router.check_idle()


def test_the_pool_comes_back_with_its_segment() -> None:
    script = Script()
    script.running(1)
    script.pooled(2)
    script.submit(3)
    script.take()
    script.close(POOL)
    assert script.state(3).phase is Phase.QUEUED
    inventory = [
        Stored(ONE, BLOCKS, 6),
        Stored(RequestKey(2), [PoolBlockId(20), PoolBlockId(21)], 6),
        Stored(RequestKey(8), [PoolBlockId(30)], 3),
    ]
    script.take()
    script.connect(POOL, epoch=2, inventory=inventory)
    sent = script.take()
    assert not any(isinstance(message, UsePool) for _, message in sent)
    assert (POOL, MakeSpare([ONE])) in sent
    assert [message.key for _, message in sent if isinstance(message, Commit)] == [2]
    assert [message.key for _, message in sent if isinstance(message, Reserve)] == [3]
    script.tick(11)
    assert (POOL, Release([RequestKey(8)])) in script.take()


@pytest.mark.parametrize("num_known", [0, 6])
def test_the_pool_comes_back_without_having_heard_what_is_in_its_blocks(num_known: int) -> None:
    """It would keep nothing of it as a spare, while the next eviction counts on it."""
    script = Script()
    script.running(1)
    script.close(POOL)
    script.take()
    script.connect(POOL, epoch=2, inventory=[Stored(ONE, script.state(1).blocks, num_known)])
    sent = [message for to, message in script.take() if to == POOL and not isinstance(message, Welcome)]
    *committed, spare = sent
    assert spare == MakeSpare([ONE])
    commits = [each for each in committed if isinstance(each, Commit)]
    assert committed == commits and [(each.key, each.num_tokens) for each in commits] == (
        [] if num_known else [(ONE, 6)]
    )


def test_the_pool_comes_back_without_anything() -> None:
    script = Script()
    script.running(1)
    script.pooled(2)
    script.submit(3)
    script.reserve(3, [30, 31])
    script.close(POOL)
    script.take()
    script.connect(POOL, epoch=2, segment="new")
    sent = script.take()
    assert [to for to, message in sent if isinstance(message, UsePool)] == [PREFILL, DECODE]
    assert script.state(1).phase is Phase.RUNNING and script.state(1).num_cached == 0
    assert (PREFILL, Abort([RequestKey(3)])) in sent
    assert [message.key for _, message in sent if isinstance(message, Reserve)] == [2]
    script.gone(PREFILL, 3)
    assert Reserve in [type(message) for _, message in script.take()]


def test_a_new_router_adopts_what_the_pool_has() -> None:
    script = Script(connect=False)
    script.connect(GATEWAY)
    script.say(GATEWAY, Submit(request(1), delivered=[50]))
    script.connect(PREFILL)
    script.connect(DECODE)
    inventory = [Stored(ONE, BLOCKS, 6), Stored(RequestKey(2), [PoolBlockId(20)], 6)]
    script.connect(POOL, inventory=inventory)
    assert script.state().phase is Phase.POOLED
    script.say(GATEWAY, Submit(request(2), delivered=[]))
    script.reserve(2, [20, 21])
    work = [message.works[0] for _, message in script.take() if isinstance(message, Prefill)]
    assert work[0].num_cached == 5


@pytest.mark.parametrize("policy", ["aligned", "priority", "fcfs"])
def test_a_new_router_runs_nothing_from_kv_of_which_the_pool_may_just_be_making_room(policy: str) -> None:
    script = Script(connect=False, policy=policy)
    for name in (PREFILL, DECODE, GATEWAY):
        script.connect(name)
    script.connect(POOL, inventory=[Stored(RequestKey(2), [PoolBlockId(20), PoolBlockId(21)], 6)])
    script.submit(1)
    script.say(GATEWAY, Submit(request(2), delivered=[50]))
    asked = [message.key for _, message in script.take() if isinstance(message, Reserve)]
    assert asked == [1, 2]
    # what the first got was the second's
    script.say(POOL, Reserved(ONE, [PoolBlockId(20), PoolBlockId(21)], dropped=[RequestKey(2)]))
    script.reserve(2, [22, 23])
    sent = [message for _, message in script.take()]
    assert not any(isinstance(message, Offer) for message in sent)
    works = {
        work.request.key: work for message in sent if isinstance(message, Prefill) for work in message.works
    }
    assert works[RequestKey(2)].num_cached == 0


def test_a_new_router_goes_on_with_what_the_pool_still_has_when_it_is_asked() -> None:
    script = Script(connect=False)
    for name in (PREFILL, DECODE, GATEWAY):
        script.connect(name)
    script.connect(POOL, inventory=[Stored(ONE, BLOCKS, 6)])
    script.say(GATEWAY, Submit(request(1), delivered=[50]))
    assert script.take_reserve() == (ONE, 6)
    script.reserve(1)
    assert (POOL, Commit) in [(to, type(message)) for to, message in script.take()]
    assert script.state().phase is Phase.POOLED and script.state().num_cached == 6


def test_room_for_kv_that_the_pool_dropped_meanwhile_is_too_little_to_compute_it_again() -> None:
    script = Script(connect=False)
    for name in (PREFILL, DECODE, GATEWAY):
        script.connect(name)
    blocks = [PoolBlockId(10), PoolBlockId(11)]
    script.connect(POOL, inventory=[Stored(ONE, blocks, 8)])
    script.say(GATEWAY, Submit(request(1, num_prompt=8), delivered=[50]))
    assert script.take_reserve() == (ONE, 8)
    script.say(POOL, Reserved(RequestKey(9), None, dropped=[ONE]))
    script.reserve(1, [10, 11])
    assert script.take_reserve() == (ONE, 9)
    script.reserve(1, [10, 11, 12])
    work = script.take_one(Prefill, PREFILL).works[0]
    assert (work.num_cached, work.blocks) == (0, [10, 11, 12])


def test_a_prompt_is_computed_again_whose_logprobs_may_have_been_lost() -> None:
    """The first token, and they with it, may have died with the router; then the pool's copy is of no use."""
    for delivered, num_cached in (([], 0), ([50], 6)):
        script = Script(connect=False)
        for name in (PREFILL, DECODE, GATEWAY):
            script.connect(name)
        script.connect(POOL, inventory=[Stored(ONE, BLOCKS, num_tokens=6)])
        wanted = request()
        wanted.params.prompt_logprobs = 0
        script.say(GATEWAY, Submit(wanted, delivered=delivered))
        assert script.state().num_cached == num_cached
        sent = script.take()
        assert ((POOL, Release([ONE])) in sent) == (num_cached == 0)


def test_a_new_router_adopts_nothing_that_the_pool_has_given_away_meanwhile() -> None:
    script = Script(connect=False)
    for name in (PREFILL, DECODE, GATEWAY):
        script.connect(name)
    script.connect(POOL, inventory=[Stored(ONE, BLOCKS, num_tokens=7)])
    script.say(POOL, Reserved(RequestKey(2), None, dropped=[ONE]))
    script.say(GATEWAY, Submit(request(1), delivered=[50, 60]))
    assert script.state().num_cached == 0 and not script.state().blocks


def test_messages_of_the_dead_are_ignored() -> None:
    script = Script()
    script.running()
    script.close(DECODE)
    script.take()
    script.close(DECODE)
    assert not script.take()


def test_an_answer_of_the_pool_to_an_earlier_question_is_void() -> None:
    """Its client left and asked again meanwhile: the blocks of the first answer were released."""
    script = Script()
    script.submit()
    first = script.take_one(Reserve, POOL)
    script.say(GATEWAY, Abort([ONE]))
    script.submit()
    second = script.take_one(Reserve, POOL)
    script.say(POOL, Reserved(ONE, [PoolBlockId(1), PoolBlockId(2)], number=first.number))
    assert script.state().phase is Phase.RESERVING and not script.take()
    script.say(POOL, Reserved(ONE, [PoolBlockId(3), PoolBlockId(4)], number=second.number))
    assert script.take_one(Prefill, PREFILL).works[0].blocks == [3, 4]
