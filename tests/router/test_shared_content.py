"""Prompts that begin alike have their KV in the pool once: what the pool is told, and what follows from its answer."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from alignedserve.protocol.messages import (
    Abort,
    Commit,
    Evict,
    Failed,
    ForgetAll,
    MakeSpare,
    Moved,
    NewTokens,
    Prefill,
    Release,
    Reserve,
    Reserved,
    Stored,
    Submit,
)
from alignedserve.router.events import Connected
from alignedserve.router.requests import Phase
from alignedserve.sampling_params import SamplingParams
from alignedserve.scheduling.prefixes import block_hashes_of
from alignedserve.types import InstanceId, RequestKey
from tests.router.script import (
    BLOCK_SIZE,
    DECODE,
    GATEWAY,
    ONE,
    POOL,
    PREFILL,
    Script,
    decode_report,
    hello,
    pool_blocks,
    prefill_report,
    request,
)

COLOCATED = "colocated-0"


def script_of(**limits: Any) -> Script:
    script = Script(connect=False)
    for name in (POOL, PREFILL, DECODE, GATEWAY):
        script.connect(name, enable_prefix_caching=True, **limits)
    script.take()
    return script


def submit(script: Script, num_prompt: int = 10, **changes: Any) -> Reserve:
    script.say(GATEWAY, Submit(replace(request(num_prompt=num_prompt), **changes)))
    reserve: Reserve = script.take_one(Reserve, POOL)
    return reserve


def found(script: Script, num_tokens: int, blocks: list[int] | None = None) -> None:
    given = pool_blocks(*(blocks or [10, 11, 12]))
    script.say(POOL, Reserved(ONE, given, num_tokens=num_tokens, num_found=num_tokens))


def hashes(num_prompt: int = 10, **salt: str) -> list[bytes]:
    return block_hashes_of(list(range(num_prompt)), BLOCK_SIZE, **salt)


def test_the_pool_is_told_what_a_prompt_may_have_in_common() -> None:
    assert submit(script_of()).hashes == hashes()
    assert submit(script_of(), cache_salt="a").hashes == hashes(salt="a")
    assert submit(script_of(), adapter="b").hashes == hashes(adapter="b")


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_nothing_is_shared_where_that_is_off_or_would_be_wrong(enable_prefix_caching: bool) -> None:
    script = Script(connect=False)
    for name in (POOL, PREFILL, DECODE, GATEWAY):
        script.connect(name, enable_prefix_caching=enable_prefix_caching)
    script.take()
    params = SamplingParams(max_tokens=3, prompt_logprobs=1 if enable_prefix_caching else None)
    assert submit(script, params=params).hashes == []
    assert submit(script_of(window=8)).hashes == []


@pytest.mark.parametrize("partial", [None, POOL, PREFILL])
def test_with_a_window_prompts_are_shared_where_they_are_saved_whole(partial: str | None) -> None:
    script = Script(connect=False)
    for name in (POOL, PREFILL, DECODE, GATEWAY):
        saves_whole = name in (POOL, PREFILL) and name != partial
        script.connect(name, enable_prefix_caching=True, window=8, saves_whole=saves_whole)
    script.take()
    assert submit(script).hashes == ([] if partial else hashes())


def windowed() -> Script:
    return script_of(window=8, tile_tokens=4, saves_whole=True)


def evicted(script: Script) -> Commit:
    """The request runs, has lost its copy in the pool, and is evicted with what it has found there since."""
    script.say(POOL, Reserved(RequestKey(9), None, dropped=[ONE]))
    script.token(wants_evicted=[ONE])
    script.take()
    found(script, 4, [*range(20, 40)])
    order = script.take_one(Evict, DECODE)
    assert order.num_saved == 4
    script.decode(evicted=[(ONE, script.state().num_tokens - 1)])
    return next(message for _, message in script.take() if isinstance(message, Commit))


def test_the_pool_is_told_which_columns_of_a_victim_may_lack_blocks() -> None:
    script = windowed()
    script.submit(num_prompt=70, tier="be")
    script.reserve()
    script.first_token()
    script.take()
    script.saved()
    whole = next(message for _, message in script.take() if isinstance(message, Commit))
    # What begins alike would take its own blocks at a decode instance, so it goes there in no group.
    assert (whole.first_whole, whole.prefix_group) == (0, 0)
    script.chosen(1)
    script.decode(admitted=[ONE])
    # 71 tokens have KV, and the next one attends to those from 64 on.
    assert evicted(script).first_whole == 16
    script.say(POOL, Reserved(RequestKey(9), None, dropped=[ONE]))
    assert script.state().first_whole == 0


def test_what_an_earlier_version_of_an_instance_computes_is_found_by_no_request() -> None:
    script = windowed()
    submit(script, num_prompt=20)
    script.close(PREFILL)
    script.connect(PREFILL, epoch=2, enable_prefix_caching=True, window=8, tile_tokens=4)
    found(script, 8, [10, 11, 12, 13, 14])
    assert script.take_one(Prefill, PREFILL).works[0].num_cached == 8
    script.first_token()
    script.saved()
    assert script.take_one(Commit, POOL).first_whole == 3


def test_a_request_that_can_use_none_of_its_kv_gets_other_blocks() -> None:
    """An earlier router had it evicted with 21 tokens, and this one knows of 18."""
    script = windowed()
    submit(script, num_prompt=18)
    script.say(POOL, Reserved(ONE, pool_blocks(10, 11, 12, 13, 14, 15), num_tokens=21))
    sent = [message for _, message in script.take()]
    assert Release([ONE]) in sent and not any(isinstance(each, Prefill) for each in sent)
    (again,) = [each for each in sent if isinstance(each, Reserve)]
    assert again.hashes == hashes(18)


@pytest.mark.parametrize(("encoding", "is_exact"), [("kv", True), ("kv-fp8", True), ("kv-int8", False)])
def test_kv_that_the_pool_keeps_only_nearly_is_not_shared(encoding: str, is_exact: bool) -> None:
    script = Script(connect=False)
    for name in (PREFILL, DECODE, GATEWAY):
        script.connect(name, enable_prefix_caching=True)
    script._on(Connected(replace(hello(POOL), fingerprint={"encoding": encoding})))
    script.take()
    assert submit(script).hashes == (hashes() if is_exact else [])


def test_a_prefill_instance_gets_what_was_found_as_cached() -> None:
    script = script_of()
    submit(script)
    found(script, 8)
    (work,) = script.take_one(Prefill, PREFILL).works
    assert (work.num_cached, work.num_found, work.blocks) == (8, 8, [10, 11, 12])
    counters = script.router.state.counters.of(POOL)
    assert (counters.num_asked_tokens, counters.num_found_tokens) == (10, 8)
    assert script.router.state.cluster.prefills[0].pending.total == 2
    # A copy to the pool that fails takes nothing of that away.
    script.say(PREFILL, Failed(ONE, "save", "reset"))
    script.tick(0.1)
    assert script.state().num_cached == 8 and not script.state().is_alone


def test_the_last_token_is_computed_whatever_the_pool_says() -> None:
    script = script_of()
    submit(script)
    found(script, 12)
    (work,) = script.take_one(Prefill, PREFILL).works
    assert work.num_cached == 9


def test_what_is_taken_back_is_committed_as_far_as_it_was_found() -> None:
    script = script_of()
    submit(script)
    found(script, 8)
    script.close(PREFILL)
    assert script.take_one(Commit, POOL).num_tokens == 8


def test_a_request_with_blocks_tells_no_hashes_and_keeps_its_count() -> None:
    script = script_of()
    submit(script)
    found(script, 8)
    script.close(PREFILL)
    script.take()
    script.connect(PREFILL, epoch=2, enable_prefix_caching=True)
    assert script.take_one(Reserve, POOL).hashes == []
    script.say(POOL, Reserved(ONE, pool_blocks(10, 11, 12), num_tokens=8))
    (work,) = script.take_one(Prefill, PREFILL).works
    assert (work.num_cached, work.num_found) == (8, 8)


def test_a_request_whose_load_failed_is_computed_alone() -> None:
    script = script_of()
    submit(script)
    found(script, 8)
    script.take()
    script.say(PREFILL, Failed(ONE, "load", "no such bytes"))
    script.tick(0.3)
    sent = [message for _, message in script.take()]
    assert Release([ONE]) in sent
    (again,) = [each for each in sent if isinstance(each, Reserve)]
    assert again.hashes == []


@pytest.mark.parametrize("is_staged", [False, True], ids=["load", "pull"])
def test_a_request_with_a_wrong_block_is_computed_and_all_is_forgotten(is_staged: bool) -> None:
    script = script_of()
    submit(script)
    found(script, 8)
    if is_staged:
        script.first_token()
        script.saved()
        script.chosen(1)
    script.take()
    has_found_wrong_block(script, is_staged)
    # Others may ask for it before the request starts again.
    assert script.take() == [(name, ForgetAll(1)) for name in (POOL, PREFILL, DECODE)]
    what, sender = ("pull", DECODE) if is_staged else ("load", PREFILL)
    script.say(sender, Failed(ONE, what, "it is not as it was saved", pool_blocks(11)[0]))
    script.tick(0.3)
    sent = [message for _, message in script.take()]
    assert Release([ONE]) in sent
    (again,) = [each for each in sent if isinstance(each, Reserve)]
    assert again.hashes == []
    script.say(POOL, Reserved(ONE, pool_blocks(20, 21, 22), number=again.number))
    (work,) = script.take_one(Prefill, PREFILL).works
    assert (work.num_cached, work.is_alone) == (0, True)


def has_found_wrong_block(script: Script, in_decode: bool = False) -> None:
    moved = [Moved("load", 0, 0.0, num_checked=3, num_changed=1)]
    if in_decode:
        script.decode(moved=moved)
    else:
        script.say(PREFILL, prefill_report(moved=moved))


def test_only_requests_of_which_nothing_exists_share_kv_after_a_wrong_block() -> None:
    """The others may have loaded it, or something that was computed from it."""
    script = script_of()
    submit(script)
    found(script, 8)
    has_found_wrong_block(script)
    script.take()
    for key in (2, 3):
        submit(script, key=RequestKey(key))
    script.close(POOL)
    assert [script.state(RequestKey(key)).phase for key in (2, 3)] == [Phase.QUEUED] * 2
    has_found_wrong_block(script)
    submitted = [script.state(RequestKey(key)) for key in (1, 2, 3)]
    assert [(state.is_alone, state.era) for state in submitted] == [(True, 0), (False, 2), (False, 2)]
    assert submitted[1].work().era == 2


@pytest.mark.parametrize("name", [POOL, PREFILL, DECODE])
def test_a_process_that_may_have_missed_it_is_told_again_to_forget_all(name: InstanceId) -> None:
    script = script_of()
    script.close(name)
    has_found_wrong_block(script, in_decode=name == PREFILL)
    script.take()
    script.connect(name, epoch=2, inventory=[], enable_prefix_caching=True)
    assert ForgetAll(1) in [message for to, message in script.take() if to == name]


def test_kv_that_the_pool_had_given_before_is_of_an_earlier_era() -> None:
    script = script_of()
    submit(script)
    # Its answer is lost with the connection.
    script.close(POOL)
    has_found_wrong_block(script)
    orphan = Stored(RequestKey(2), pool_blocks(20, 21, 22), 10)
    inventory = [Stored(ONE, pool_blocks(10, 11, 12), 8), orphan]
    script.connect(POOL, epoch=2, inventory=inventory, enable_prefix_caching=True)
    script.submit(2, num_prompt=11)
    assert [script.state(key).num_cached for key in (1, 2)] == [8, 10]
    assert [script.state(key).is_alone for key in (1, 2)] == [True, True]


def test_kv_that_the_pool_had_of_an_unknown_request_is_of_an_earlier_era() -> None:
    script = script_of()
    has_found_wrong_block(script)
    submit(script)
    # Not in the inventory as committed: an earlier router had reserved it, and its prefix was found.
    script.say(POOL, Reserved(ONE, pool_blocks(10, 11, 12), num_tokens=8, num_found=0))
    assert (script.state().num_cached, script.state().is_alone) == (8, True)


def test_loads_that_find_no_change_are_no_reason_to_forget() -> None:
    script = script_of()
    script.say(PREFILL, prefill_report(moved=[Moved("load", 64, 0.1, num_checked=3)]))
    assert script.take() == []


def test_a_victim_saves_only_what_the_pool_lacks() -> None:
    script = script_of()
    submit(script, 12)
    found(script, 8, [10, 11, 12, 13])
    script.first_token()
    script.saved()
    script.chosen(1)
    script.decode(admitted=[ONE])
    script.say(POOL, Reserved(ONE, None, dropped=[ONE], number=99))
    script.take()
    script.token(wants_evicted=[ONE])
    assert script.take_one(Reserve, POOL).hashes == hashes(12)
    found(script, 12, [10, 11, 30, 31, 32, 33])
    evict = script.take_one(Evict, DECODE)
    assert (evict.num_saved, evict.blocks) == (12, [10, 11, 30, 31, 32, 33])


def test_a_pool_that_was_killed_after_it_had_found_something_says_so_again() -> None:
    script = script_of()
    submit(script)
    script.close(POOL)
    script.take()
    inventory = [Stored(ONE, pool_blocks(10, 11, 12), 8)]
    script.connect(POOL, epoch=2, inventory=inventory, enable_prefix_caching=True)
    assert script.state().num_cached == 8 and script.state().blocks == [10, 11, 12]


def colocated_script() -> Script:
    """Three requests run on a colocated instance."""
    script = Script(connect=False)
    for name in (POOL, COLOCATED, GATEWAY):
        script.connect(name, enable_prefix_caching=True)
    for key in (1, 2, 3):
        script.say(GATEWAY, Submit(request(key, num_prompt=10)))
    script.say(COLOCATED, decode_report(admitted=[RequestKey(key) for key in (1, 2, 3)]))
    script.take()
    return script


def spoilt(script: Script, *keys: int) -> list[tuple[str, ForgetAll]]:
    """An iteration yields NaN for these requests. Returns which eras were begun where."""
    error: dict[str, Any] = {"finish_reason": "error", "error": "NaN", "is_spoilt": True}
    script.say(COLOCATED, decode_report(news=[NewTokens(RequestKey(key), 0, [], **error) for key in keys]))
    return [(name, message) for name, message in script.take() if isinstance(message, ForgetAll)]


def test_what_may_be_wrong_is_found_no_more_and_what_has_kv_shares_none() -> None:
    script = colocated_script()
    assert spoilt(script, 1) == [(POOL, ForgetAll(1)), (COLOCATED, ForgetAll(1))]
    assert [script.state(RequestKey(key)).is_alone for key in (2, 3)] == [True, True]


def test_an_iteration_begins_one_era_and_what_has_kv_of_before_begins_no_other() -> None:
    script = colocated_script()
    assert len(spoilt(script, 1, 2)) == 2 and script.router.state.era == 1
    assert spoilt(script, 3) == [] and script.router.state.era == 1
    # A later one may share again, so its KV may be wrong for others.
    script.say(GATEWAY, Submit(request(4, num_prompt=10)))
    script.say(COLOCATED, decode_report(admitted=[RequestKey(4)]))
    script.take()
    assert spoilt(script, 4) == [(POOL, ForgetAll(2)), (COLOCATED, ForgetAll(2))]


def test_kv_of_a_request_that_shares_nothing_any_more_may_be_wrong_for_others() -> None:
    script = colocated_script()
    script.state(RequestKey(3)).is_alone = True
    assert len(spoilt(script, 3)) == 2


def test_kv_that_may_be_wrong_is_forgotten_even_if_its_client_is_gone() -> None:
    script = colocated_script()
    script.say(GATEWAY, Abort([ONE]))
    assert len(spoilt(script, 1)) == 2


def test_what_an_earlier_router_had_found_may_be_wrong_as_well() -> None:
    """Its instance was still computing the request, so the request begins here without KV."""
    script = Script(connect=False)
    inventory = [Stored(ONE, pool_blocks(10, 11, 12), 8, is_new=True)]
    script.connect(POOL, inventory=inventory, enable_prefix_caching=True)
    for name in (PREFILL, DECODE, GATEWAY):
        script.connect(name, enable_prefix_caching=True)
    script.submit(2)
    script.reserve(2)
    script.first_token(2, finish_reason="error", error="NaN", is_spoilt=True)
    script.take()
    submit(script)
    script.say(POOL, Reserved(ONE, pool_blocks(10, 11, 12), num_tokens=8))
    (work,) = script.take_one(Prefill, PREFILL).works
    assert (work.num_cached, work.is_alone) == (8, True)


@pytest.mark.parametrize("share_blocks", [False, True])
@pytest.mark.parametrize("tier", ["rt", "be"])
def test_reversed_blocks_are_known_to_nobody(tier: str, share_blocks: bool) -> None:
    """Best effort has them where it shares blocks with real time, and hashes do not say so."""
    script = Script(connect=False, policy="bros", share_blocks=share_blocks)
    for name in (POOL, COLOCATED, GATEWAY):
        script.connect(name, enable_prefix_caching=True)
    script.say(GATEWAY, Submit(replace(request(num_prompt=10), tier=tier)))
    script.say(COLOCATED, decode_report(admitted=[ONE], news=[NewTokens(ONE, 0, [50])]))
    script.take()
    script.say(COLOCATED, decode_report(wants_evicted=[ONE]))
    assert script.take_one(Reserve, POOL).hashes == ([] if tier == "be" and share_blocks else hashes())


def test_all_is_forgotten_if_the_pool_is_away_when_something_may_be_wrong() -> None:
    script = script_of()
    submit(script)
    found(script, 8)
    script.close(POOL)
    script.take()
    script.first_token(finish_reason="error", error="NaN", is_spoilt=True)
    told = [name for name, message in script.take() if message == ForgetAll(1)]
    assert told == [PREFILL, DECODE]
    script.connect(POOL, epoch=2, inventory=[], enable_prefix_caching=True)
    assert ForgetAll(1) in [message for name, message in script.take() if name == POOL]


def test_best_effort_of_which_nothing_was_computed_holds_no_room() -> None:
    script = script_of()
    submit(script, tier="be")
    found(script, 8)
    script.close(PREFILL)
    sent = [message for name, message in script.take() if name == POOL]
    assert MakeSpare([ONE]) in sent


def test_an_error_that_says_nothing_about_kv_leaves_it_known() -> None:
    script = script_of()
    submit(script)
    found(script, 8)
    script.take()
    script.first_token(finish_reason="error", error="no such grammar")
    assert not [message for _, message in script.take() if isinstance(message, ForgetAll)]
    assert script.state().phase is Phase.LEAVING


def test_what_an_instance_may_still_be_filling_is_not_claimed_by_a_new_router() -> None:
    """Its blocks beyond what was found must not become free before the instance has dropped its orders."""
    script = Script(connect=False)
    inventory = [Stored(ONE, pool_blocks(10, 11, 12), 8, is_new=True)]
    script.connect(POOL, inventory=inventory, enable_prefix_caching=True)
    for name in (PREFILL, DECODE, GATEWAY):
        script.connect(name, enable_prefix_caching=True)
    script.take()
    assert submit(script).key == ONE
    # it has them all the same, and goes on after what was found
    script.say(POOL, Reserved(ONE, pool_blocks(10, 11, 12), num_tokens=8))
    (work,) = script.take_one(Prefill, PREFILL).works
    assert (work.num_cached, work.blocks) == (8, [10, 11, 12])


@pytest.mark.parametrize(("tier", "caching"), [("be", True), ("rt", True), ("be", False)])
def test_the_pool_is_told_which_candidates_of_best_effort_begin_alike(tier: str, caching: bool) -> None:
    script = Script(connect=False, prefill_window=100)
    for name in (POOL, PREFILL, DECODE, GATEWAY):
        script.connect(name, num_blocks=1000, enable_prefix_caching=caching)
    groups = []
    for key, first in ((1, 7), (2, 7), (3, 8)):
        one = replace(request(key), tier=tier, prompt=[first] * 128 + [key] * 20)
        script.say(GATEWAY, Submit(one))
        script.reserve(key, [1000 * key])
        script.first_token(key)
        script.take()
        script.saved(key)
        commits = [message for _, message in script.take() if isinstance(message, Commit)]
        groups += [each.prefix_group for each in commits if each.is_candidate]
    if tier == "rt" or not caching:
        assert groups == [0, 0, 0]
    else:
        assert groups[0] == groups[1] != groups[2] != 0
