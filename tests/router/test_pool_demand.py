"""All that is under way fits the pool, with the memory of colocated instances."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from alignedserve.protocol.messages import (
    Abort,
    Commit,
    Gone,
    MakeSpare,
    NewTokens,
    Offer,
    Prefill,
    Release,
    Reserve,
    Reserved,
    Submit,
)
from alignedserve.router.requests import Phase
from alignedserve.types import RequestKey
from tests.router.script import (
    DECODE,
    GATEWAY,
    ONE,
    POOL,
    PREFILL,
    Script,
    decode_report,
    pool_blocks,
    prefill_report,
    request,
)


def submit(script: Script, key: int, tier: str = "be", predicted_len: int = 10, **options: Any) -> None:
    asked = replace(request(key, **options), tier=tier)
    script.say(GATEWAY, Submit(asked, predicted_len=predicted_len))


def reserving(script: Script) -> list[int]:
    return [message.key for _, message in script.take() if isinstance(message, Reserve)]


def test_best_effort_starts_as_far_as_the_pool_will_hold_it() -> None:
    """A hundred blocks, five for real time; each will have 40 + 50 tokens, and two blocks more when it leaves."""
    script = Script()
    for key in range(1, 7):
        submit(script, key, num_prompt=40, max_tokens=100, predicted_len=50)
        script.reserve(key)
        script.first_token(key)
        script.saved(key)
    assert reserving(script) == [1, 2, 3]
    submit(script, 8, "rt", num_prompt=40, max_tokens=100, predicted_len=50)
    assert reserving(script) == [8], "real time is not held back"


@pytest.mark.parametrize(("num_decode_blocks", "started"), [(60, [2, 3]), (240, [2, 3, 4])])
def test_a_quarter_of_the_decode_memory_counts_beside_real_time(
    num_decode_blocks: int, started: list[int]
) -> None:
    """Real time will have 50 of the pool's hundred blocks, and each of best effort 25."""
    script = Script(connect=False)
    script.connect(POOL, num_blocks=100)
    script.connect(PREFILL)
    script.connect(DECODE, num_blocks=num_decode_blocks)
    script.connect(GATEWAY)
    submit(script, 1, "rt", num_prompt=100, max_tokens=99, predicted_len=99)
    script.reserve(1)
    script.first_token(1)
    script.saved(1)
    script.take()
    for key in range(2, 7):
        submit(script, key, num_prompt=40, max_tokens=100, predicted_len=50)
        if key in started:
            script.reserve(key)
            script.first_token(key)
            script.saved(key)
    assert reserving(script) == started


@pytest.mark.parametrize(
    ("num_instances", "num_pool_blocks", "num_started"), [(1, 100, 7), (1, 60, 6), (2, 60, 9)]
)
def test_at_colocated_instances_only_what_exceeds_their_memory_needs_the_pool(
    num_instances: int, num_pool_blocks: int, num_started: int
) -> None:
    """Each instance has a hundred blocks, and each request will have 25: all of it fits 95 % of all memory."""
    script = Script(connect=False)
    script.connect(POOL, num_blocks=num_pool_blocks)
    for number in range(num_instances):
        script.connect(f"colocated-{number}")
    script.connect(GATEWAY)
    script.take()
    offered: dict[RequestKey, str] = {}
    for key in range(1, 13):
        submit(script, key, num_prompt=40, max_tokens=100, predicted_len=50)
        for to, message in script.take():
            if isinstance(message, Offer):
                offered |= {work.request.key: to for work in message.works}
        if instance := offered.get(RequestKey(key)):
            news = [NewTokens(RequestKey(key), 0, [50])]
            script.say(instance, decode_report(admitted=[RequestKey(key)], news=news))
    assert [*offered] == [*range(1, num_started + 1)]
    script.say(offered[ONE], decode_report(news=[NewTokens(ONE, 1, [51], finish_reason="stop")]))
    (offer,) = [message for _, message in script.take() if isinstance(message, Offer)]
    assert [work.request.key for work in offer.works] == [num_started + 1], (
        "the end of one makes room for the next"
    )


@pytest.mark.parametrize("has_rt", [True, False])
def test_real_time_at_a_colocated_instance_does_not_wait_for_room_in_the_pool(has_rt: bool) -> None:
    script = Script(connect=False)
    for name in (POOL, "colocated-0", GATEWAY):
        script.connect(name)
    submit(script, 1, num_prompt=40, max_tokens=100, predicted_len=50)
    script.say("colocated-0", decode_report(admitted=[ONE], news=[NewTokens(ONE, 0, [50])]))
    if has_rt:
        submit(script, 2, "rt", num_prompt=40)
    script.say("colocated-0", decode_report(wants_evicted=[ONE]))
    script.take()
    script.say(POOL, Reserved(ONE, None))
    assert script.router.state.counters.num_recomputed == has_rt
    assert script.state().phase is (Phase.LEAVING if has_rt else Phase.MAKING_ROOM)


def test_what_grows_beyond_its_prediction_is_counted_with_twice_as_much() -> None:
    script = Script()
    demand = script.router.state.demand
    submit(script, 1, num_prompt=4, max_tokens=100, predicted_len=2)
    assert demand.num_blocks == 2 + 2
    script.reserve()
    script.first_token()
    script.saved()
    script.chosen(1)
    script.decode(admitted=[RequestKey(1)])
    while len(script.state().output) < 9:
        script.token()
    assert demand.num_blocks == (4 + 16) // 4 + 2
    script.token(finish_reason="stop")
    assert (demand.num_blocks, demand.num_be, len(demand)) == (0, 0, 0)


def test_unknown_lengths_are_taken_for_those_that_ended() -> None:
    script = Script()
    submit(script, 1, num_prompt=4, predicted_len=0, max_tokens=200)
    assert script.router.state.demand.num_blocks == 50, "as long as it may be"
    script.reserve()
    script.first_token(finish_reason="stop")
    submit(script, 2, num_prompt=4, predicted_len=0, max_tokens=200)
    script.gone(PREFILL)
    assert script.router.state.demand.num_blocks == 2 + 2


@pytest.mark.parametrize(("be_share", "started"), [(0.05, [3]), (0.5, [3, 4])])
def test_one_may_always_run_and_best_effort_has_its_share(be_share: float, started: list[int]) -> None:
    """Whatever real time takes: three of it fill the pool, and more than a quarter of the decode instance."""
    script = Script(be_share=be_share)
    for key in (1, 2, 11):
        submit(script, key, "rt", num_prompt=100, max_tokens=99, predicted_len=99)
        script.reserve(key)
        script.first_token(key)
        script.saved(key)
    script.take()
    submit(script, 3, num_prompt=20)
    submit(script, 4, num_prompt=4)
    assert reserving(script) == started


def interrupted(script: Script) -> None:
    """Request 1, which the prefill instance gave back with two blocks of it saved; 2 has its place in the window."""
    submit(script, 1, num_prompt=20)
    script.reserve(1, [10, 11, 12, 13, 14])
    submit(script, 2, num_prompt=40)
    script.take()
    script.say(PREFILL, prefill_report(saved=[(RequestKey(1), 8)]))


def test_an_interrupted_prompt_goes_on_where_it_was_and_is_nobodys_spare() -> None:
    script = Script(prefill_window=1)
    interrupted(script)
    (commit,) = [message for to, message in script.take() if to == POOL]
    assert (commit.key, commit.num_tokens, commit.is_candidate) == (1, 8, False)  # type: ignore[union-attr]
    script.say(POOL, Reserved(RequestKey(2), None))
    assert script.state(2).phase is Phase.QUEUED and not script.take()
    script.tick(0.1)
    assert reserving(script) == [1, 2], "with what it holds it is in nobody's way"
    script.reserve(1, [10, 11, 12, 13, 14])
    work = script.take_one(Prefill, PREFILL).works[0]
    assert (work.num_cached, work.blocks) == (8, [10, 11, 12, 13, 14])


def test_real_time_takes_what_an_interrupted_prompt_holds() -> None:
    script = Script(prefill_window=1)
    interrupted(script)
    demand = script.router.state.demand
    assert script.state(1).phase is Phase.QUEUED and demand.num_be == 2
    submit(script, 3, "rt", num_prompt=8)
    script.take()
    script.say(POOL, Reserved(RequestKey(3), None))
    assert [message for _, message in script.take()] == [
        MakeSpare([RequestKey(1)]),
        Reserve(RequestKey(3), 8, number=4),
    ]
    assert demand.num_be == 1
    script.say(POOL, Reserved(RequestKey(3), pool_blocks(1, 2), dropped=[RequestKey(1)]))
    assert (script.state(1).num_cached, script.state(1).blocks) == (0, [])


def test_a_victim_takes_it_before_it_waits() -> None:
    script = Script(prefill_window=1)
    script.running(7)
    interrupted(script)
    script.decode(wants_evicted=[RequestKey(7)])
    script.take()
    script.say(POOL, Reserved(RequestKey(7), None))
    assert [message for _, message in script.take()] == [
        MakeSpare([RequestKey(1)]),
        Reserve(RequestKey(7), 15, number=5),
    ]


def test_two_interrupted_prompts_do_not_wait_for_each_other_for_ever() -> None:
    script = Script(prefill_window=1)
    interrupted(script)
    script.reserve(2)
    script.say(PREFILL, prefill_report(saved=[(RequestKey(2), 12)]))
    assert reserving(script)[-2:] == [1, 2]
    for key in (1, 2):
        script.say(POOL, Reserved(RequestKey(key), None))
    assert [message.keys for _, message in script.take() if isinstance(message, MakeSpare)] == [[1]]
    assert script.state(2).phase is Phase.RESERVING


@pytest.mark.parametrize("policy", ["priority", "fcfs"])
def test_without_deadlines_it_is_a_spare_like_others(policy: str) -> None:
    script = Script(prefill_window=1, policy=policy)
    interrupted(script)
    *_, committed, spare = [message for to, message in script.take() if to == POOL]
    assert spare == MakeSpare([ONE])
    # or the pool would free blocks on whose KV the router counts
    assert isinstance(committed, Commit) and not committed.is_candidate
    assert (committed.key, committed.num_tokens) == (ONE, script.state(1).num_cached) and committed.num_tokens


def test_a_victim_that_is_given_up_leaves_the_pool_nothing_that_it_was_about_to_reserve() -> None:
    """Its last question is still under way when all victims stand still."""
    script = Script()
    submit(script, 1, num_prompt=4, max_tokens=100)
    script.reserve()
    script.first_token()
    script.saved()
    script.chosen(1)
    script.decode(admitted=[ONE])
    script.say(POOL, Reserved(RequestKey(99), None, dropped=[ONE]))
    script.decode(wants_evicted=[ONE])
    script.say(POOL, Reserved(ONE, None))
    for _ in range(100):
        script.take()
        script.tick(0.1)
        script.router._pool.retry_refused()
        if script.state().phase is Phase.LEAVING:
            break
    sent = script.take()
    assert (POOL, Release([ONE])) in sent and (DECODE, Abort([ONE])) in sent
    script.say(DECODE, Gone([ONE]))
    assert [type(message) for to, message in script.take() if to == POOL] == [Reserve]


# ---- common prefixes -------------------------------------------------------------------------------------------------


def script_of(enable_prefix_caching: bool = True, **limits: Any) -> Script:
    script = Script(connect=False)
    for name in (POOL, PREFILL, DECODE, GATEWAY):
        script.connect(name, enable_prefix_caching=enable_prefix_caching, **limits)
    return script


def submit_prompt(script: Script, key: int, prompt: list[int], tier: str = "be") -> None:
    asked = replace(request(key, max_tokens=8), prompt=prompt, tier=tier)
    script.say(GATEWAY, Submit(asked, predicted_len=8))


def counted(script: Script, key: int, prompt: list[int], **options: Any) -> tuple[int, int]:
    submit_prompt(script, key, prompt, **options)
    demand = script.router.state.demand
    return demand.num_blocks, demand.num_be_blocks


def test_blocks_of_a_common_prefix_count_once_and_until_the_last_leaves() -> None:
    """Each has ten blocks of prompt and two of output. Eight are in common; the last token's block never is."""
    script, common = script_of(), list(range(32))
    assert counted(script, 1, [*common, *range(100, 108)]) == (12, 12)
    assert counted(script, 2, [*common, *range(200, 208)], tier="rt") == (12 + 4, 12)
    assert counted(script, 3, [*common, *range(200, 208)]) == (16 + 3, 12 + 4)
    demand = script.router.state.demand
    for key, left in ((1, (15, 12)), (3, (12, 0)), (2, (0, 0))):
        script.say(GATEWAY, Abort([RequestKey(key)]))
        assert (demand.num_blocks, demand.num_be_blocks) == left


def test_as_many_behind_a_prefix_run_as_their_own_blocks_leave_room_for() -> None:
    """Of a pool's hundred blocks, each takes 3 behind a prefix of 25, in place of 28."""
    script = script_of(num_blocks=100)
    common = list(range(100))
    for key in range(1, 9):
        submit_prompt(script, key, [*common, *[900 + key] * 4])
        if script.state(key).phase is Phase.RESERVING:
            script.reserve(key)
            script.first_token(key)
            script.saved(key)
    assert len(reserving(script)) == 8


@pytest.mark.parametrize(
    "limits", [{"enable_prefix_caching": False}, {"window": 8}, {"window": 8, "saves_whole": True}]
)
def test_where_nothing_is_shared_each_counts_for_itself(limits: dict[str, Any]) -> None:
    script = script_of(**limits)
    assert counted(script, 1, list(range(40))) == (12, 12)
    assert counted(script, 2, list(range(40))) == (24, 24)
