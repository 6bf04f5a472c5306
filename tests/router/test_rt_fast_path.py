"""Real time goes to a decode instance at once where best effort can make room; else in batches of like lengths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from alignedserve.protocol.messages import (
    Abort,
    AnnounceRt,
    Commit,
    FormBatch,
    NewTokens,
    Offer,
    Stage,
    Submit,
)
from alignedserve.router.cluster import NUM_AVERAGED
from alignedserve.router.requests import Phase, RequestState
from alignedserve.router.views import DecodeView
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.island import Assign
from alignedserve.scheduling.policies.aligned.router.batches import offer_one_each
from alignedserve.scheduling.policies.aligned.router.part import (
    ITERATIONS_TO_RUN,
    MAX_UNFIT,
    NUM_LEADS,
    OTHERS_PER_LOST,
    AlignedRouter,
    LeadTime,
    LostTurns,
    _assign_fast_path,
    _is_any_late,
    waits_in_time,
)
from alignedserve.timing.deadlines import Deadlines
from alignedserve.types import RequestKey
from tests.router.script import (
    DECODE,
    GATEWAY,
    POOL,
    PREFILL,
    Script,
    decode_report,
    pool_blocks,
    prefill_report,
    request,
)


def pooled(script: Script, key: int, tier: str, **options: Any) -> None:
    script.say(GATEWAY, Submit(replace(request(key, **options), tier=tier, tbt_s=0.1), predicted_len=5))
    script.reserve(key, [10 * key, 10 * key + 1])
    script.first_token(key)
    script.saved(key)


def full_of_best_effort(script: Script, num_free_blocks: int = 4, num_be_blocks: int = 96) -> None:
    """All eight slots."""
    for key in range(1, 9):
        pooled(script, key, "be")
    script.chosen(*range(1, 9))
    keys = [RequestKey(key) for key in range(1, 9)]
    script.decode(
        admitted=keys, num_free_blocks=num_free_blocks, num_be_blocks=num_be_blocks, num_be_running=8
    )
    script.take()


def offered(script: Script, to: str = DECODE) -> list[int]:
    return [
        work.request.key
        for name, message in script.take()
        if isinstance(message, Offer) and name == to
        for work in message.works
    ]


def test_real_time_is_offered_to_an_instance_full_of_best_effort() -> None:
    script = Script()
    full_of_best_effort(script)
    pooled(script, 9, "be")
    assert offered(script) == []
    pooled(script, 10, "rt")
    sent = [message for _, message in script.take() if isinstance(message, Commit | Offer)]
    assert [type(message) for message in sent][-2:] == [Commit, Offer]
    assert not sent[-2].is_candidate, "no batch is formed with it any more"  # type: ignore[union-attr]
    assert not sent[-1].is_batch  # type: ignore[union-attr]
    assert script.router.state.counters.num_fast_path == 1


def ended(script: Script, key: int) -> None:
    """A running request has its last token, and frees its slot."""
    last = NewTokens(RequestKey(key), len(script.state(key).output), [60], finish_reason="stop")
    script.decode(news=[last], duration_s=0.03)


def test_without_best_effort_a_lost_request_goes_after_those_in_time() -> None:
    """A batch would take the one that has waited longest, until each is admitted when it is late already."""
    script = Script()
    keys = [RequestKey(key) for key in range(1, 9)]
    for key in keys:
        pooled(script, key, "rt")
    script.chosen(*keys)
    script.decode(admitted=keys, num_running=8)
    pooled(script, 10, "rt")
    script.now = 3.0
    pooled(script, 11, "rt")
    # In time still, but not when it could run.
    script.now = 3.15
    pooled(script, 12, "rt")
    script.take()
    ended(script, 1)
    sent = [message for _, message in script.take()]
    assert [work.request.key for each in sent if isinstance(each, Offer) for work in each.works] == [12]
    assert not [each for each in sent if isinstance(each, FormBatch)]
    # They follow when none is in time, and the one that is not lost yet goes first.
    for ends, follows in ((2, 11), (3, 10)):
        ended(script, ends)
        assert offered(script) == [follows]


def test_beside_best_effort_a_lost_request_goes_after_those_in_time_as_well() -> None:
    """And each instance is offered one request of best effort, the first that would not fill it."""
    script = Script()
    keys = [RequestKey(key) for key in range(1, 9)]
    for key in keys:
        pooled(script, key, "rt")
    script.chosen(*keys)
    script.decode(admitted=keys, num_running=8, num_free_blocks=4)
    script.say(GATEWAY, Submit(replace(request(20), tier="be"), predicted_len=5))
    script.reserve(20, [*range(200, 215)])
    script.first_token(20)
    script.saved(20)
    for small in (21, 22):
        pooled(script, small, "be")
    script.chosen()
    pooled(script, 10, "rt")
    script.take()
    script.now = 3.0
    pooled(script, 11, "rt")
    assert offered(script) == [21]
    script.now = 3.15
    pooled(script, 12, "rt")
    assert offered(script) == []
    ended(script, 1)
    sent = [message for _, message in script.take()]
    assert [work.request.key for each in sent if isinstance(each, Offer) for work in each.works] == [12]
    assert not [each for each in sent if isinstance(each, FormBatch)]
    for ends, follows in ((2, 11), (3, 10)):
        ended(script, ends)
        assert offered(script) == [follows]


def test_not_more_than_best_effort_can_make_room_for() -> None:
    """Three blocks each; four are free and four can be."""
    script = Script()
    full_of_best_effort(script, num_free_blocks=4, num_be_blocks=4)
    for key in (10, 11, 12):
        pooled(script, key, "rt")
    assert offered(script) == [10, 11]
    script.decode(num_free_blocks=4, num_be_blocks=7, num_be_running=8)
    assert offered(script) == [12]


def test_an_instance_full_of_real_time_gets_batches() -> None:
    script = Script()
    for key in range(1, 9):
        pooled(script, key, "rt")
    script.chosen(*range(1, 9))
    script.decode(admitted=[RequestKey(key) for key in range(1, 9)])
    pooled(script, 9, "be")
    script.chosen()
    script.take()
    pooled(script, 10, "rt")
    sent = [message for _, message in script.take()]
    assert not any(isinstance(message, Offer) for message in sent)
    assert any(isinstance(message, FormBatch) for message in sent)


def test_where_all_is_real_time_batches_are_of_like_lengths() -> None:
    script = Script()
    pooled(script, 1, "rt")
    assert [type(message) for to, message in script.take() if to == DECODE] == []


def test_the_instance_with_least_real_time_is_chosen() -> None:
    script = Script()
    script.connect("decode-1")
    full_of_best_effort(script)
    pooled(script, 10, "rt")
    assert offered(script, "decode-1") == [10], "it has none"
    pooled(script, 11, "rt")
    assert offered(script, DECODE) == [11]


def test_due_first_goes_first() -> None:
    script = Script()
    full_of_best_effort(script, num_free_blocks=0, num_be_blocks=0)
    for key, tbt_s in ((10, 0.9), (11, 0.3), (12, 0.6)):
        asked = replace(request(key), ttft_s=1.0, tbt_s=tbt_s)
        script.say(GATEWAY, Submit(asked))
        script.reserve(key, [10 * key, 10 * key + 1])
        script.first_token(key)
        script.saved(key)
    commits = [message for _, message in script.take() if isinstance(message, Commit)]
    assert [commit.due_s for commit in commits] == pytest.approx([0.9, 0.3, 0.6]), "after the first"
    script.decode(num_free_blocks=0, num_be_blocks=6)
    assert offered(script) == [11, 12]


@pytest.mark.parametrize(("num_free_blocks", "kind"), [(90, Stage), (1, Offer)])
def test_what_is_urgent_is_staged_only_if_there_is_room_at_once(
    num_free_blocks: int, kind: type[Any]
) -> None:
    script = Script(link="gloo")
    full_of_best_effort_by_link(script)
    script.say(PREFILL, prefill_report(num_free_blocks=num_free_blocks))
    script.say(GATEWAY, Submit(request(10)))
    script.reserve(10, [100, 101])
    script.first_token(10)
    state = script.state(10)
    script.say(
        PREFILL, prefill_report(saved=[(state.key, state.num_tokens - 1)], num_free_blocks=num_free_blocks)
    )
    assert [type(message) for _, message in script.take() if isinstance(message, Stage | Offer)] == [kind]


def full_of_best_effort_by_link(script: Script) -> None:
    for key in (1, 2):
        pooled(script, key, "be")
    script.chosen(1, 2)
    keys = [RequestKey(1), RequestKey(2)]
    script.say(PREFILL, prefill_report(staged=keys))
    script.say(DECODE, decode_report(admitted=keys, num_be_blocks=6, num_be_running=2))
    script.take()


@pytest.mark.parametrize("policy", ["priority", "fcfs"])
def test_others_wait_for_a_slot(policy: str) -> None:
    script = Script(policy=policy)
    for key in range(1, 11):
        pooled(script, key, "be")
    script.decode(admitted=[RequestKey(key) for key in range(1, 9)], num_be_blocks=80, num_be_running=8)
    script.take()
    pooled(script, 11, "rt")
    assert offered(script) == []
    script.token(1, finish_reason="stop")
    assert offered(script) == ([11] if policy == "priority" else [9])


# ---- announcements --------------------------------------------------------------------------------------------------


def announced(script: Script) -> list[tuple[int, int]]:
    return [
        (message.num_prefilling, message.num_ready)
        for name, message in script.take()
        if isinstance(message, AnnounceRt) and name == DECODE
    ]


def submit_real_time(script: Script, key: int) -> None:
    script.say(GATEWAY, Submit(replace(request(key), tier="rt", tbt_s=0.1), predicted_len=5))


def test_a_decode_instance_is_told_of_real_time_from_its_prefill_to_its_offer() -> None:
    script = Script()
    full_of_best_effort(script)
    submit_real_time(script, 10)
    assert announced(script) == [], "it has no room in the pool yet"
    script.reserve(10, [100, 101])
    assert announced(script) == [(1, 0)]
    script.first_token(10)
    assert announced(script) == [(0, 1)]
    script.saved(10)
    sent = [message for _, message in script.take() if isinstance(message, AnnounceRt | Offer)]
    assert [type(message) for message in sent] == [Offer, AnnounceRt] and sent[-1] == AnnounceRt(0, 0)


@pytest.mark.parametrize("has_token", [False, True])
def test_real_time_that_is_aborted_is_not_coming_any_more(has_token: bool) -> None:
    script = Script()
    full_of_best_effort(script)
    submit_real_time(script, 10)
    script.reserve(10, [100, 101])
    if has_token:
        script.first_token(10)
    script.take()
    script.say(GATEWAY, Abort([RequestKey(10)]))
    assert announced(script) == [(0, 0)]


def test_a_decode_instance_that_comes_back_is_told_anew() -> None:
    script = Script()
    full_of_best_effort(script)
    submit_real_time(script, 10)
    script.reserve(10, [100, 101])
    script.close(DECODE)
    script.connect(DECODE, epoch=2)
    script.take()
    submit_real_time(script, 11)
    script.reserve(11, [110, 111])
    assert announced(script) == [(1, 0)]


def test_without_best_effort_nobody_is_told() -> None:
    script = Script()
    submit_real_time(script, 10)
    script.reserve(10, [100, 101])
    assert announced(script) == []


def test_those_that_are_due_first_are_looked_at_first_whenever_they_were_pooled() -> None:
    script = Script(connect=False)
    for name in (POOL, PREFILL, GATEWAY):
        script.connect(name, num_blocks=10**6)
    for key in (1, 2, 3):
        script.say(GATEWAY, Submit(replace(request(key), tbt_s=0.1)))
        script.reserve(key, [10 * key, 10 * key + 1])
        script.now += 1.0
        script.first_token(key)
    for key in (3, 1, 2):
        script.saved(key)
    waiting = script.router.state.decode_queue
    assert [state.key for state in waiting.soonest(9, 0.0)] == [1, 2, 3]
    assert [state.key for state in waiting.soonest(2, 0.0)] == [1, 2]
    assert [state.key for state in waiting.soonest(9, script.now)] == [3, 1, 2], "lost ones are last"
    assert [state.key for state in waiting.soonest(2, script.now)] == [3, 1]
    script.say(GATEWAY, Abort([RequestKey(1)]))
    assert [state.key for state in waiting.soonest(2, 0.0)] == [2, 3]


def test_one_that_is_lost_goes_first_after_many_that_are_not() -> None:
    def waiting(key: int, due_s: float) -> RequestState:
        found = RequestState(request(key), GATEWAY, Phase.POOLED, 0.0)
        found.deadlines = Deadlines(True, due_s, 0.1)
        return found

    turns, seen = LostTurns(), []
    lost = [waiting(1, -20.0), waiting(2, -10.0)]
    others = [waiting(key, 1000.0 + key) for key in range(3, 3 + 2 * OTHERS_PER_LOST)]
    while others:
        first = turns.in_order([*others, *lost], 0.0)[0]
        assert len([*turns.note([Assign(DECODE, [first])])]) == 1
        lost, others = ([each for each in some if each is not first] for some in (lost, others))
        seen.append(first.key)
    assert [place for place, key in enumerate(seen) if key < 3] == [OTHERS_PER_LOST]
    assert [*turns.in_order(lost, 0.0)] == lost


def test_the_turn_of_lost_ones_lasts_until_the_first_of_them_has_gone() -> None:
    """It may wait for more room than others take."""
    first, second, other = (RequestState(request(key), GATEWAY, Phase.POOLED, 0.0) for key in (1, 2, 3))
    for state, due_s in ((first, -20.0), (second, -10.0), (other, 10.0)):
        state.deadlines = Deadlines(True, due_s, 0.1)
    turns = LostTurns()
    for _ in range(OTHERS_PER_LOST):
        assert turns.in_order([other, first, second], 0.0)[0] is other and turns.next is None
        assert [*turns.note([Assign(DECODE, [other])])]
    for _ in range(2):
        assert [*turns.in_order([other, first, second], 0.0)] == [first, other, second]
        assert turns.next is first
        assert [*turns.note([Assign(DECODE, [second])])]
    turns.in_order([other, first, second], 0.0)
    assert [*turns.note([Assign(DECODE, [first])])] and turns.next is None


def test_a_lost_request_keeps_its_turn_while_other_owners_have_theirs() -> None:
    lost, other, of_b = (
        RequestState(replace(request(key), owner=owner), GATEWAY, Phase.POOLED, 0.0)
        for key, owner in ((1, "a"), (2, "a"), (3, "b"))
    )
    for state, due_s in ((lost, -20.0), (other, 10.0), (of_b, 10.0)):
        state.deadlines = Deadlines(True, due_s, 0.1)
    turns = LostTurns()
    for _ in range(OTHERS_PER_LOST):
        assert turns.in_order([other, lost], 0.0)[0] is other
        assert [*turns.note([Assign(DECODE, [other])])]
        assert [*turns.in_order([of_b], 0.0)] == [of_b] and turns.next is None
    assert turns.in_order([other, lost], 0.0)[0] is lost


def test_an_instance_is_kept_for_a_lost_request_that_fits_nowhere() -> None:
    script = Script(connect=False)
    for name in (POOL, PREFILL, GATEWAY):
        script.connect(name, num_blocks=1000)
    script.connect(DECODE, num_blocks=10)
    small, large = (RequestState(request(key), GATEWAY, Phase.POOLED, 0.0) for key in (1, 2))
    small.blocks, large.blocks = pool_blocks(1, 2), pool_blocks(*range(10))
    views = script.router.state.cluster.decodes

    def assigned(waiting: RequestState | None) -> list[int]:
        found = _assign_fast_path([large, small], views, waiting)
        return [int(each.key) for assign in found for each in assign.requests]

    assert assigned(None) == [2], "ten blocks, without a spare one"
    script.decode(num_free_blocks=6, num_running=2)
    assert assigned(None) == [1] and assigned(large) == []
    script.connect("decode-1", num_blocks=5)
    views = script.router.state.cluster.decodes
    assert assigned(large) == [1], "only one is kept"
    script.decode(num_free_blocks=2, num_running=2)
    assert assigned(large) == [1], "the emptier one could never hold it"


def test_a_large_lost_request_waits_for_as_many_tokens_of_others() -> None:
    large, other = (RequestState(request(key), GATEWAY, Phase.POOLED, 0.0) for key in (1, 2))
    large.output = [0] * (3 * other.num_tokens - large.num_tokens)
    large.deadlines, other.deadlines = Deadlines(True, -20.0, 0.1), Deadlines(True, 10.0, 0.1)
    turns = LostTurns()
    for _ in range(3 * OTHERS_PER_LOST):
        assert turns.in_order([other, large], 0.0)[0] is other
        assert [*turns.note([Assign(DECODE, [other])])]
    assert turns.in_order([other, large], 0.0)[0] is large


def test_a_small_lost_request_waits_for_as_many_others() -> None:
    small, other = (RequestState(request(key), GATEWAY, Phase.POOLED, 0.0) for key in (1, 2))
    other.output = [0] * 1000
    small.deadlines, other.deadlines = Deadlines(True, -20.0, 0.1), Deadlines(True, 200.0, 0.1)
    turns = LostTurns()
    for _ in range(OTHERS_PER_LOST):
        assert turns.in_order([other, small], 0.0)[0] is other
        assert [*turns.note([Assign(DECODE, [other])])]
    assert turns.in_order([other, small], 0.0)[0] is small


def test_others_count_only_while_a_lost_request_waits() -> None:
    lost, other = (RequestState(request(key), GATEWAY, Phase.POOLED, 0.0) for key in (1, 2))
    lost.deadlines, other.deadlines = Deadlines(True, -20.0, 0.1), Deadlines(True, 10.0, 0.1)
    turns = LostTurns()
    for _ in range(3 * OTHERS_PER_LOST):
        assert [*turns.in_order([other], 0.0)] == [other]
        turns.took(other)
    turns.in_order([other], 0.0)
    for _ in range(OTHERS_PER_LOST):
        assert turns.in_order([other, lost], 0.0)[0] is other
        turns.took(other)
    assert turns.in_order([other, lost], 0.0)[0] is lost


def test_of_many_that_fit_nowhere_few_are_tried_but_smaller_ones_go(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(connect=False)
    for name in (POOL, PREFILL, GATEWAY):
        script.connect(name, num_blocks=1000)
    script.connect(DECODE, num_blocks=10)
    script.decode(num_free_blocks=4, num_running=2)
    views = script.router.state.cluster.decodes
    tried: list[int] = []
    blocks_to_run = DecodeView.blocks_to_run

    def counted(view: DecodeView, state: RequestState) -> int:
        tried.append(int(state.key))
        return blocks_to_run(view, state)

    def waiting(num_large: int) -> Iterator[RequestState]:
        for key in range(num_large + 1):
            state = RequestState(request(key), GATEWAY, Phase.POOLED, 0.0)
            state.blocks = pool_blocks(*range(10 if key < num_large else 2))
            yield state

    monkeypatch.setattr(DecodeView, "blocks_to_run", counted)
    for num_large in (3, 300):
        tried.clear()
        (found,) = _assign_fast_path(waiting(num_large), views)
        assert [each.key for each in found.requests] == [num_large]
        assert len(tried) == min(num_large, MAX_UNFIT) + 1
    script.decode(num_free_blocks=0, num_running=2)
    tried.clear()
    assert not _assign_fast_path(waiting(300), views) and not tried


def test_large_best_effort_that_has_waited_long_holds_up_one_instance_at_a_time() -> None:
    script = Script(connect=False)
    for name in (POOL, PREFILL, GATEWAY):
        script.connect(name, num_blocks=1000)
    for key in (1, 2, 3):
        script.pooled(key, tier="be")
        state = script.state(key)
        state.blocks = pool_blocks(*range(50 if key < 3 else 2))
    script.tick(1000.0)
    for decode in ("decode-0", "decode-1"):
        script.connect(decode, num_blocks=100)
        script.say(decode, decode_report(num_free_blocks=40, num_running=2))
    island, config = script.router.state.island, SchedulingConfig()

    def offers() -> list[tuple[str, list[int]]]:
        found = offer_one_each(island, config)
        return [(each.decode, [int(one.key) for one in each.requests]) for each in found]

    assert offers() == [("decode-0", [1]), ("decode-1", [3])], "not both of the large ones"
    first = island.cluster.decodes[0]
    first.be_promised[RequestKey(1)] = first.near[RequestKey(1)] = 51
    script.router.state.decode_queue.discard(script.state(1))
    assert offers() == [("decode-1", [3])], "one waits there for room"
    script.say("decode-0", decode_report(num_free_blocks=60, num_running=1))
    assert offers() == [("decode-1", [2])], "it has room now"


def test_those_without_an_objective_hide_none_that_is_late() -> None:
    script = Script(connect=False)
    for name in (POOL, PREFILL, GATEWAY):
        script.connect(name, num_blocks=10**6)
    for key in range(1, 100):
        script.pooled(key)
    island = script.router.state.island
    script.now += 11.0
    assert not _is_any_late(island, script.now)
    pooled(script, 100, "rt")
    assert not _is_any_late(island, script.now)
    script.now += 5.0
    assert _is_any_late(island, script.now)
    script.say(GATEWAY, Abort([RequestKey(100)]))
    assert not _is_any_late(island, script.now)


def test_real_time_without_objectives_leaves_in_order_of_arrival() -> None:
    script = Script(connect=False)
    for name in (POOL, PREFILL, GATEWAY):
        script.connect(name, num_blocks=10**6)
    script.pooled(1)
    script.now += 9.0
    script.pooled(2)
    script.pooled(3)
    script.now += 3.0
    queue = script.router.state.decode_queue
    assert [state.key for state in queue.soonest(9, script.now)] == [1, 2, 3]
    assert [state.key for state in queue.soonest(2, script.now)] == [1, 2]
    assert waits_in_time(script.router.state.island, LeadTime())
    script.now += 19.0
    script.say(GATEWAY, Abort([RequestKey(1)]))
    assert len(queue) == 2 and not waits_in_time(script.router.state.island, LeadTime())


def test_real_time_without_an_objective_counts_as_lost_after_a_while() -> None:
    script = Script(connect=False)
    for name in (POOL, PREFILL, GATEWAY):
        script.connect(name, num_blocks=10**6)
    script.pooled(1)
    for _ in range(3):
        script.now += 4.0
        pooled(script, 10 + int(script.now), "rt")
    waiting = script.router.state.decode_queue
    assert [state.key for state in waiting.soonest(9, 9.0)] == [22, 1, 14, 18]
    assert [state.key for state in waiting.soonest(9, 12.05)] == [22, 14, 18, 1]


def test_the_time_of_second_tokens_is_that_of_requests_that_are_not_lost() -> None:
    """The first one has its second token half a second after the first, the other long after it is lost."""
    script = Script()
    for key, wait_s in ((1, 0.05), (2, 9.0)):
        pooled(script, key, "rt")
        script.chosen(key)
        script.now += wait_s
        script.decode(admitted=[RequestKey(key)], news=[NewTokens(RequestKey(key), 1, [7])])
    found = script.router.state.cluster.second_token_s
    assert found == pytest.approx(0.05 / NUM_AVERAGED)


def test_one_that_is_lost_does_not_hide_one_that_waits_in_time() -> None:
    script = Script(connect=False)
    for name in (POOL, PREFILL, GATEWAY):
        script.connect(name, num_blocks=10**6)
    island = script.router.state.island
    assert not waits_in_time(island, LeadTime())
    pooled(script, 1, "rt")
    assert waits_in_time(island, LeadTime())
    script.now += 9.0
    pooled(script, 2, "rt")
    assert waits_in_time(island, LeadTime())
    script.say(GATEWAY, Abort([RequestKey(2)]))
    assert len(script.router.state.decode_queue) == 1 and not waits_in_time(island, LeadTime()), (
        "the other is lost"
    )


def test_how_soon_an_assigned_request_has_its_token_is_measured() -> None:
    """Its token comes after five iterations of 20 ms. Later, those of 10 ms count."""
    script, lead = Script(), LeadTime()
    script.decode(duration_s=0.02)
    island = script.router.state.island
    assert lead.seconds(island) == pytest.approx(ITERATIONS_TO_RUN * 0.02)
    for number in range(NUM_LEADS):
        state = RequestState(request(number), GATEWAY, Phase.POOLED, 0.0)
        lead.note([Assign(DECODE, [state])], island)
        script.tick(0.1)
        state.output.append(7)
        lead.learn(island.now)
    assert lead.seconds(island) == pytest.approx(5 * 0.02)
    script.decode(duration_s=0.01)
    assert lead.seconds(island) == pytest.approx(5 * 0.01)


def test_the_router_measures_it_where_real_time_takes_the_fast_path() -> None:
    script = Script()
    full_of_best_effort(script)
    script.decode(num_free_blocks=4, num_be_blocks=96, num_be_running=8, duration_s=0.02)
    pooled(script, 20, "rt")
    assert offered(script) == [20]
    script.now += 0.1
    script.decode(admitted=[RequestKey(20)], news=[NewTokens(RequestKey(20), 1, [7])], duration_s=0.02)
    policy = script.router.policy
    assert isinstance(policy, AlignedRouter)
    assert policy._lead._last[DECODE][-1] == pytest.approx(5.0)
