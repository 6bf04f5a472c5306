"""A prompt for a colocated instance, of which the pool may have a part: what the pool is asked, and what the instance
is told."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from alignedserve.protocol.messages import (
    Abort,
    AnyMessage,
    Commit,
    Evict,
    Failed,
    MakeSpare,
    NewTokens,
    Offer,
    Release,
    Reserve,
    Reserved,
    Submit,
    Work,
)
from alignedserve.router.requests import Phase
from alignedserve.scheduling.prefixes import TOKENS_PER_HASH, block_hashes_of
from alignedserve.types import PoolBlockId
from tests.router.script import BLOCK_SIZE, GATEWAY, ONE, POOL, Script, decode_report, pool_blocks, request

COLOCATED = "colocated-0"
NUM_PROMPT = 14
HASHES = block_hashes_of(range(NUM_PROMPT), BLOCK_SIZE)
TWO, THREE = request(2).key, request(3).key


def script_of(**options: Any) -> Script:
    script = Script(
        connect=False, **{name: options.pop(name) for name in {*options} & {"policy", "share_blocks"}}
    )
    for name in (POOL, COLOCATED, GATEWAY):
        script.connect(name, **{"enable_prefix_caching": True} | options)
    script.take()
    return script


def submit(script: Script, key: int = 1, **changes: Any) -> None:
    script.submit(key, **{"num_prompt": NUM_PROMPT} | changes)


def offered(script: Script) -> Work:
    offer: Offer = script.take_one(Offer, COLOCATED)
    (work,) = offer.works
    return work


def say(script: Script, **report: Any) -> None:
    script.say(COLOCATED, decode_report(**report))


def end(script: Script, key: int = 1, is_held: bool = True) -> None:
    """Runs the request up to the end of its only token."""
    state = script.state(key)
    say(script, admitted=[state.key])
    news = [NewTokens(state.key, len(state.output), [50], finish_reason="stop")]
    say(script, news=news, ended=[state.key] if is_held else [])


def save(script: Script) -> None:
    """Request 1 computes its prompt, and the pool gets it."""
    submit(script)
    assert offered(script).num_cached == 0
    script.state().request = replace(script.state().request, has_next_turn=True)
    end(script)
    asked = script.take_one(Reserve, POOL)
    assert (asked.hashes, asked.is_optional, asked.num_tokens) == (HASHES, True, 12)
    script.say(POOL, Reserved(ONE, pool_blocks(10, 11, 12)))
    assert script.take_one(Evict, COLOCATED) == Evict(ONE, pool_blocks(10, 11, 12), 0)
    say(script, evicted=[(ONE, 12)])
    script.take()
    assert script.router.is_idle


def found(script: Script, *blocks: int, key: int = 2) -> None:
    """The pool answers with these blocks."""
    num_tokens = BLOCK_SIZE * len(blocks)
    answer = Reserved(request(key).key, pool_blocks(*blocks), num_tokens=num_tokens, num_found=num_tokens)
    script.say(POOL, answer)


def test_a_prompt_is_saved_when_its_answer_ends_and_the_next_one_finds_it() -> None:
    script = script_of()
    save(script)
    submit(script, 2)
    asked = script.take_one(Reserve, POOL)
    assert asked.finds_only and asked.hashes == HASHES and script.state(2).phase is Phase.RESERVING
    found(script, 10, 11, 12)
    work = offered(script)
    assert (work.num_cached, work.num_found, work.blocks) == (12, 12, pool_blocks(10, 11, 12))
    assert work.is_first and script.state(2).phase is Phase.OFFERED
    say(script, admitted=[TWO])
    # The instance has loaded it, so the pool may drop it.
    assert script.take_one(MakeSpare, POOL).keys == [TWO]
    end(script, 2, is_held=False)
    assert [message for name, message in script.take() if name == POOL] == [Release([TWO])]
    script.router.check_idle()
    stats = script.router.state.counters.of(POOL)
    assert (stats.num_asked_tokens, stats.num_found_tokens) == (NUM_PROMPT, 12)


def test_a_prompt_that_begins_as_none_did_asks_nothing() -> None:
    script = script_of()
    save(script)
    other = replace(request(2, NUM_PROMPT), prompt=[9, *range(1, NUM_PROMPT)], tier="rt")
    script.say(GATEWAY, Submit(other))
    assert not [message for name, message in script.take() if name == POOL]
    assert script.state(2).phase is Phase.OFFERED


def test_many_prompts_of_another_owner_do_not_hide_what_was_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignedserve.router.pool_client.MOST_SAVED", 2)
    script = script_of()
    save(script)
    for key in range(2, 6):
        submit_as(script, key, "key:b", prompt=[key, *range(1, NUM_PROMPT)], has_next_turn=True)
        end(script, key)
        assert script.take_one(Reserve, POOL).is_optional
        script.say(POOL, Reserved(request(key).key, None))
        script.take()
    submit_as(script, 6, "key:b", prompt=[2, *range(1, NUM_PROMPT)])
    assert not [message for name, message in script.take() if name == POOL], "its own have gone"
    submit(script, 7)
    assert script.take_one(Reserve, POOL).finds_only


def submit_as(script: Script, key: int, owner: str, **changes: Any) -> None:
    asked = replace(request(key, NUM_PROMPT), owner=owner, tier="rt", **changes)
    script.say(GATEWAY, Submit(asked))


@pytest.mark.parametrize(
    "options",
    [
        {"enable_prefix_caching": False},
        {"policy": "bros", "share_blocks": True},
        {"max_restored_blocks": 8},
    ],
    ids=str,
)
def test_nor_does_one_that_shares_nothing(options: dict[str, Any]) -> None:
    script = script_of(knows_content=True, **options)
    for name in (1, 2):
        submit(script, name)
        assert not [message for name, message in script.take() if name == POOL]


def test_what_is_not_found_is_computed() -> None:
    script = script_of()
    save(script)
    submit(script, 2)
    script.take()
    found(script)
    work = offered(script)
    assert (work.num_cached, work.blocks) == (0, [])
    say(script, admitted=[TWO])
    assert not [message for name, message in script.take() if name == POOL]


def test_a_request_with_a_little_in_the_pool_is_promised_all_blocks_of_its_prompt() -> None:
    script = script_of()
    save(script)
    before = script.router.state.cluster.decodes[0].num_available_blocks
    submit(script, 2, num_prompt=41)
    script.take()
    found(script, 10)
    view = script.router.state.cluster.decodes[0]
    # Eleven columns of prompt, and one more.
    assert before - view.num_available_blocks == 12


def test_a_new_router_asks_a_pool_that_knows_anything() -> None:
    for knows in (False, True):
        script = Script(connect=False)
        script.connect(COLOCATED, enable_prefix_caching=True)
        script.connect(GATEWAY)
        script.connect(POOL, enable_prefix_caching=True, knows_content=knows)
        script.take()
        submit(script)
        assert (script.state().phase is Phase.RESERVING) is knows


def test_a_client_that_leaves_while_the_pool_is_asked_leaves_nothing() -> None:
    script = script_of()
    save(script)
    submit(script, 2)
    script.take()
    script.say(GATEWAY, Abort([TWO]))
    assert [message for name, message in script.take() if name == POOL] == [Release([TWO])]
    found(script, 10)
    assert not script.take() and script.router.is_idle


@pytest.mark.parametrize("wrong_block", [None, PoolBlockId(11)])
def test_kv_that_did_not_arrive_is_computed(wrong_block: PoolBlockId | None) -> None:
    """What made it fail may last, and then it would never start."""
    script = script_of()
    save(script)
    submit(script, 2)
    found(script, 10, 11)
    script.take()
    script.say(COLOCATED, Failed(TWO, "pull", "not today", wrong_block))
    script.tick(0.1)
    sent: list[AnyMessage] = [message for name, message in script.take() if name == POOL]
    assert Release([TWO]) in sent and script.state(2).phase is Phase.OFFERED
    assert script.state(2).is_alone and not script.state(2).num_cached


def test_a_victim_whose_instance_dies_takes_no_blocks_that_the_pool_may_have_given_anew() -> None:
    """The pool is asked for room for two victims. For the first it may drop what it has of the second."""
    script = script_of()
    save(script)
    submit(script, 2)
    found(script, 10, 11, 12)
    script.say(GATEWAY, Submit(replace(request(3), prompt=[9] * 6, tier="rt")))
    say(script, admitted=[TWO, THREE])
    say(script, wants_evicted=[THREE, TWO])
    script.take()
    assert script.state(2).phase is Phase.MAKING_ROOM
    script.close(COLOCATED)
    sent = [message for name, message in script.take() if name == POOL]
    assert Release([TWO]) in sent and not any(isinstance(each, Commit | MakeSpare) for each in sent)
    # What it was asked before
    script.say(POOL, Reserved(THREE, pool_blocks(20, 21), dropped=[TWO]))
    script.say(POOL, Reserved(TWO, pool_blocks(10, 11, 12, 13), num_tokens=12))
    script.connect(COLOCATED, epoch=2, enable_prefix_caching=True)
    asked = {each.key: each for name, each in script.take() if name == POOL and isinstance(each, Reserve)}
    assert asked[TWO].hashes == HASHES and script.state(2).num_cached == 0


@pytest.mark.parametrize("has_slot", [True, False])
def test_among_equals_a_prompt_goes_to_an_instance_that_has_it_and_a_slot(has_slot: bool) -> None:
    script = script_of(knows_content=True)
    num_prompt = 2 * TOKENS_PER_HASH + 2
    submit(script, num_prompt=num_prompt)
    found(script, key=1)
    end(script, is_held=False)
    script.connect("colocated-1", enable_prefix_caching=True)
    view = script.router.state.cluster.decodes[0]
    view.hello.limits.max_num_seqs = 8 if has_slot else 0
    submit(script, 2, num_prompt=num_prompt)
    found(script, *range(10, 10 + num_prompt // BLOCK_SIZE))
    assert script.state(2).num_cached > TOKENS_PER_HASH
    assert script.state(2).instance_id == (COLOCATED if has_slot else "colocated-1")


def test_after_an_era_nothing_is_asked_until_something_is_saved() -> None:
    script = script_of(knows_content=True)
    submit(script)
    found(script, key=1)
    say(script, admitted=[ONE])
    say(script, news=[NewTokens(ONE, 0, [], finish_reason="error", is_spoilt=True)])
    script.take()
    submit(script, 2)
    assert script.state(2).phase is Phase.OFFERED
    assert not [message for name, message in script.take() if name == POOL]


def test_the_pool_is_asked_again_when_the_instance_that_keeps_inputs_has_left() -> None:
    script = script_of()
    save(script)
    script.connect("colocated-1", enable_prefix_caching=True, max_restored_blocks=8)
    submit(script, 2)
    assert script.state(2).phase is Phase.OFFERED and POOL not in [name for name, _ in script.take()]
    script.close("colocated-1")
    script.take()
    submit(script, 3)
    assert script.take_one(Reserve, POOL).hashes == HASHES and script.state(3).phase is Phase.RESERVING


def test_the_pool_is_lost_while_it_is_asked() -> None:
    script = script_of()
    save(script)
    submit(script, 2)
    script.close(POOL)
    assert script.state(2).phase is Phase.QUEUED
    script.take()
    script.connect(POOL, epoch=2, segment="new", enable_prefix_caching=True)
    asked = script.take_one(Reserve, POOL)
    assert asked.finds_only
    script.say(POOL, Reserved(TWO, []))
    assert offered(script).num_cached == 0


@pytest.mark.parametrize("num_output", [0, 1])
def test_an_evicted_prompt_gets_only_what_it_has_and_goes_on(num_output: int) -> None:
    script = script_of()
    submit(script)
    say(script, admitted=[ONE])
    say(script, news=[NewTokens(ONE, 0, [50] * num_output)] if num_output else [], wants_evicted=[ONE])
    script.take()
    script.reserve()
    say(script, evicted=[(ONE, 8)])
    asked = script.take_one(Reserve, POOL)
    assert asked.finds_only and not asked.hashes
    blocks = script.state().blocks[:2]
    script.say(POOL, Reserved(ONE, blocks, num_tokens=8))
    work = offered(script)
    assert (work.num_cached, work.blocks) == (8, blocks) and not work.is_first
    # If that does not arrive, it is computed, though it may have tokens by then.
    script.say(COLOCATED, Failed(ONE, "pull", "not today"))
    script.tick(0.1)
    assert offered(script).num_cached == 0 and script.state().is_alone
