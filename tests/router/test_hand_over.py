"""Real time with a newly computed prompt is pulled directly from there, and also saved to the pool."""

from __future__ import annotations

from typing import Any

import pytest

from alignedserve.protocol.messages import (
    Abort,
    AnyMessage,
    Commit,
    Evict,
    Failed,
    FailedPull,
    MakeSpare,
    NewTokens,
    Offer,
    Prefill,
    Release,
    Reserve,
    Stage,
    Stored,
    Unstage,
)
from alignedserve.router.link_health import MAX_FAILURES
from alignedserve.router.requests import Phase
from alignedserve.router.views import PrefillView
from alignedserve.types import InstanceId, RequestKey
from tests.router.script import DECODE, ONE, POOL, PREFILL, Script, prefill_report

NUM_PROMPT = 6
OTHER_DECODE = InstanceId("decode-1")


def computed(script: Script, key: int = 1, tier: str = "rt", **fields: Any) -> None:
    """Up to the first token; the prefill instance holds the KV."""
    script.submit(key, tier=tier)
    script.reserve(key, [10 * key, 10 * key + 1])
    script.take()
    state = script.state(key)
    news = [NewTokens(state.key, len(state.output), [50])]
    script.say(PREFILL, prefill_report(news=news, held=[state.key], **fields))


def handed_over(**options: Any) -> Script:
    script = Script(link="ipc", **options)
    computed(script)
    script.take()
    return script


def saved(script: Script) -> None:
    script.say(PREFILL, prefill_report(saved=[(ONE, NUM_PROMPT)]))


def pull_fails(script: Script, source: InstanceId = PREFILL) -> None:
    """And the router has ticked, so that the request goes on."""
    script.decode(failed_pulls=[FailedPull(source, [ONE], "reset")], num_running=0)
    script.say(DECODE, Failed(ONE, "pull", "reset"))
    script.tick(0.1)


def kinds(script: Script, to: str) -> list[type[AnyMessage]]:
    return [type(message) for name, message in script.take() if name == to]


def end(script: Script) -> None:
    """The request's last token; nothing is left of it afterwards."""
    state = script.state()
    script.decode(news=[NewTokens(ONE, len(state.output), [9], finish_reason="stop")], num_running=0)
    for name in (PREFILL, DECODE):
        script.gone(name)
    assert not script.router.state.requests.get(ONE)
    script.router.check_idle()


def test_it_is_offered_with_its_first_token_before_the_pool_has_it() -> None:
    script = Script(link="ipc")
    computed(script)
    sent = script.take()
    (offer,) = [message for to, message in sent if isinstance(message, Offer) and to == DECODE]
    assert (offer.source, offer.is_batch, offer.batch) == (PREFILL, False, 0)
    (work,) = offer.works
    assert (work.output, work.num_cached) == ([50], NUM_PROMPT), "all that is computed"
    assert not any(isinstance(message, Commit | Unstage | Stage) for _, message in sent)
    assert script.state().phase is Phase.OFFERED


@pytest.mark.parametrize("is_saved_first", [True, False])
def test_the_pool_has_a_spare_when_it_is_saved_and_runs(is_saved_first: bool) -> None:
    script = handed_over()
    if is_saved_first:
        saved(script)
        commit = script.take_one(Commit, POOL)
        assert commit.due_s == pytest.approx(2.0)
        assert commit == Commit(ONE, NUM_PROMPT, commit.due_s, False)
        script.decode(admitted=[ONE])
        assert kinds(script, POOL) == [MakeSpare]
    else:
        script.decode(admitted=[ONE])
        assert script.take() == [(PREFILL, Unstage([ONE]))], "the pool's blocks are being filled"
        saved(script)
        assert kinds(script, POOL) == [Commit, MakeSpare]
    assert script.router.state.counters.of(PREFILL).num_handed_over == 1
    script.close(DECODE)
    assert script.state().num_cached == NUM_PROMPT and script.state().phase is Phase.POOLED
    assert kinds(script, POOL) == [Commit]


def test_what_was_saved_at_once_is_handed_over_all_the_same() -> None:
    script = Script(link="ipc")
    computed(script, saved=[(ONE, NUM_PROMPT)])
    sent = script.take()
    assert [type(message) for to, message in sent if to in (POOL, DECODE)] == [Offer, Commit]
    assert not any(isinstance(message, Stage) for _, message in sent)


@pytest.mark.parametrize("why", ["best effort", "no link", "no room", "over host", "another waits"])
def test_else_it_need_not_be_held_and_goes_by_way_of_the_pool(why: str) -> None:
    script = Script(link="host" if why == "no link" else "ipc")
    if why == "no room":
        script.decode(num_free_blocks=2, num_running=0)
    elif why == "over host":
        for _ in range(MAX_FAILURES):
            script.router.state.link_health.failed(DECODE, FailedPull(PREFILL, [ONE], "reset"))
            script.router.state.link_health.tick()
    elif why == "another waits":
        script.pooled(2)
    computed(script, tier="be" if why == "best effort" else "rt")
    assert script.take_one(Unstage, PREFILL) == Unstage([ONE])
    assert script.state().phase is Phase.PREFILLING
    saved(script)
    assert script.state().phase is not Phase.PREFILLING
    assert script.state().saving_at is None


@pytest.mark.parametrize(("policy", "is_direct"), [("priority", True), ("accelgen", True), ("fcfs", False)])
def test_it_overtakes_best_effort_as_the_policy_has_it(policy: str, is_direct: bool) -> None:
    script = Script(link="ipc", policy=policy)
    script.decode(num_free_blocks=3, num_running=0)
    script.submit(2, tier="be", num_prompt=14)
    script.reserve(2, [20, 21, 22, 23])
    script.first_token(2)
    script.say(PREFILL, prefill_report(saved=[(RequestKey(2), 14)]))
    assert script.state(2).phase is Phase.POOLED, "there is no room for it"
    computed(script)
    assert (script.state().phase is Phase.OFFERED) == is_direct


def test_a_link_that_is_tried_takes_one() -> None:
    script = handed_over()
    for _ in range(MAX_FAILURES):
        script.router.state.link_health.failed(DECODE, FailedPull(PREFILL, [ONE], "reset"))
        script.router.state.link_health.tick()
    script.now += 31.0
    computed(script, 2)
    assert script.take_one(Offer, DECODE).source == PREFILL
    computed(script, 3)
    assert script.take_one(Unstage, PREFILL).keys == [3]


def test_with_best_effort_it_takes_the_fast_path() -> None:
    """To an instance that has no room but what best effort gives."""
    script = Script(link="ipc")
    script.running(2, tier="be")
    script.decode(num_free_blocks=0, num_be_blocks=20, num_be_running=1)
    computed(script)
    assert script.take_one(Offer, DECODE).source == PREFILL


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_pull_that_fails_waits_for_the_pool_to_have_it() -> None:
    script = handed_over()
    pull_fails(script)
    sent = script.take()
    assert (PREFILL, Unstage([ONE])) in sent and not any(isinstance(each, Abort) for _, each in sent)
    assert script.state().phase is Phase.PREFILLING and script.state().instance_id == PREFILL
    saved(script)
    assert script.take_one(Commit, POOL).is_candidate
    assert script.state().phase is Phase.POOLED
    script.chosen(1)
    script.say(PREFILL, prefill_report(staged=[ONE]))
    script.decode(admitted=[ONE])
    end(script)


def test_a_pull_that_fails_when_the_pool_has_it() -> None:
    script = handed_over()
    saved(script)
    script.take()
    pull_fails(script)
    assert kinds(script, PREFILL) == [Abort], "it may be pulled until it has said that it is gone"
    script.gone(PREFILL)
    assert script.take_one(Commit, POOL).is_candidate


def test_pulls_that_fail_count_against_the_link() -> None:
    script = handed_over()
    pull_fails(script)
    computed(script, 2)
    assert script.router.state.counters.of(DECODE).num_failed_pulls == 1
    assert script.router.state.counters.of(PREFILL).num_handed_over == 0


def test_a_decode_instance_that_dies_has_lost_nothing() -> None:
    """The tokens that it made are computed again, on top of what is saved."""
    script = handed_over()
    script.decode(admitted=[ONE])
    script.token()
    script.take()
    script.close(DECODE)
    assert script.take() == [] and script.state().phase is Phase.PREFILLING
    view = script.router.state.cluster.prefill(PREFILL)
    assert view and ONE in view.pending and not view.pending.total, "nothing is computed of it"
    saved(script)
    assert script.state().phase is Phase.RESERVING and script.state().num_cached == NUM_PROMPT


def test_a_prefill_instance_that_dies_before_it_has_saved_leaves_what_was_pulled() -> None:
    script = handed_over()
    script.decode(admitted=[ONE])
    script.take()
    script.close(PREFILL)
    assert script.take() == [(POOL, Release([ONE]))]
    script.token()
    assert script.state().phase is Phase.RUNNING and not script.state().blocks
    # It is evicted as any other.
    script.decode(wants_evicted=[ONE])
    assert script.take_one(Reserve, POOL).key == ONE
    script.reserve()
    assert script.take_one(Evict, DECODE).num_saved == 0


@pytest.mark.parametrize("is_dead", [True, False])
def test_what_was_neither_saved_nor_pulled_is_computed_again(is_dead: bool) -> None:
    script = handed_over()
    if is_dead:
        script.close(PREFILL)
    else:
        script.say(PREFILL, Failed(ONE, "save", "reset"))
    assert script.take() == [(POOL, Release([ONE]))]
    assert not any(
        view.held for view in script.router.state.cluster.prefills if isinstance(view, PrefillView)
    )
    pull_fails(script)
    script.connect("prefill-1")
    script.reserve()
    work = script.take_one(Prefill, "prefill-1" if is_dead else PREFILL).works[0]
    assert (work.output, work.num_cached) == ([50], 0)
    # The pool was not at fault, and may have its prefix.
    assert not script.state().is_alone


def test_a_save_that_fails_leaves_what_runs() -> None:
    script = handed_over()
    script.decode(admitted=[ONE])
    script.take()
    script.say(PREFILL, Failed(ONE, "save", "reset"))
    assert script.take() == [(POOL, Release([ONE]))]
    end(script)


def test_a_victim_waits_until_nobody_writes_to_its_pool_blocks() -> None:
    script = handed_over()
    script.decode(admitted=[ONE])
    script.decode(wants_evicted=[ONE])
    assert kinds(script, POOL) == []
    saved(script)
    assert kinds(script, POOL) == [Commit, MakeSpare, Reserve]
    assert script.state().phase is Phase.MAKING_ROOM


@pytest.mark.parametrize("is_dead", [True, False])
def test_a_victim_that_will_not_be_saved_may_leave(is_dead: bool) -> None:
    """Its decode instance, where nothing else may run, need not say so again."""
    script = handed_over()
    script.decode(admitted=[ONE])
    script.decode(wants_evicted=[ONE])
    script.take()
    if is_dead:
        script.close(PREFILL)
    else:
        script.say(PREFILL, Failed(ONE, "save", "reset"))
    assert kinds(script, POOL) == [Release, Reserve]
    assert script.state().phase is Phase.MAKING_ROOM


@pytest.mark.parametrize("is_admitted", [True, False])
def test_its_end_is_awaited_of_both(is_admitted: bool) -> None:
    script = handed_over()
    if is_admitted:
        script.decode(admitted=[ONE])
        script.decode(news=[NewTokens(ONE, 1, [9], finish_reason="stop")], num_running=0)
    else:
        script.say("gateway-0", Abort([ONE]))
        script.gone(DECODE)
    sent = script.take()
    assert (PREFILL, Abort([ONE])) in sent and not any(isinstance(each, Release) for _, each in sent)
    saved(script)  # The messages cross.
    assert script.take() == []
    script.gone(PREFILL)
    assert (POOL, Release([ONE])) in script.take()
    script.router.check_idle()


def test_a_pool_that_comes_back_leaves_alone_what_is_being_filled() -> None:
    script = handed_over()
    script.decode(admitted=[ONE])
    blocks = script.state().blocks
    script.close(POOL)
    script.take()
    script.connect(POOL, inventory=[Stored(ONE, blocks, 0)])
    assert kinds(script, DECODE) == [] and script.state().phase is Phase.RUNNING
    saved(script)
    assert kinds(script, POOL) == [Commit, MakeSpare]


def test_a_pool_with_other_memory_voids_it() -> None:
    script = handed_over()
    script.close(POOL)
    script.connect(POOL, segment="other")
    assert script.state().phase is Phase.LEAVING
    for name in (PREFILL, DECODE):
        script.gone(name)
    assert script.state().phase is Phase.RESERVING and script.state().saving_at is None


def test_another_is_chosen_where_a_link_has_failed() -> None:
    script = Script(link="ipc")
    script.connect(OTHER_DECODE)
    for _ in range(MAX_FAILURES):
        script.router.state.link_health.failed(DECODE, FailedPull(PREFILL, [ONE], "reset"))
        script.router.state.link_health.tick()
    computed(script)
    assert script.take_one(Offer, OTHER_DECODE).source == PREFILL


def test_what_is_held_takes_room_of_the_staging_buffer() -> None:
    script = handed_over()
    view = script.router.state.cluster.prefill(PREFILL)
    assert view and view.num_free_staging_blocks == 50 - 2
    script.decode(admitted=[ONE])
    assert view.num_free_staging_blocks == 50
