"""A complete answer stays in the pool for the next turn: what the pool and the decode instance are told, and what
follows when one of them does not do it."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from alignedserve.protocol.messages import (
    Abort,
    AnyMessage,
    Commit,
    Evict,
    NewTokens,
    Release,
    Reserve,
    Reserved,
    Submit,
)
from alignedserve.router.requests import Phase
from alignedserve.scheduling.prefixes import block_hashes_of
from tests.router.script import BLOCK_SIZE, DECODE, GATEWAY, ONE, POOL, PREFILL, Script, pool_blocks, request

NUM_PROMPT = 10
# With the prompt 16 tokens, of which the last has no KV: three full blocks.
ANSWER = [50, 60, 61, 62, 63, 64]


def running(script: Script, has_next_turn: bool = True, **changes: Any) -> None:
    """A request that has all but the last token of its answer."""
    wanted = replace(request(num_prompt=NUM_PROMPT), has_next_turn=has_next_turn, **changes)
    script.say(GATEWAY, Submit(wanted))
    script.reserve()
    script.first_token(token=ANSWER[0])
    script.saved()
    script.chosen(1)
    script.decode(admitted=[ONE])
    for token in ANSWER[1:-1]:
        script.token(token=token)


def script_of(**options: Any) -> Script:
    script = Script(connect=False)
    for name in (POOL, PREFILL, DECODE, GATEWAY):
        script.connect(name, **{"enable_prefix_caching": True} | options)
    return script


def end(script: Script, is_held: bool = True) -> list[tuple[str, AnyMessage]]:
    """The answer's end, and what the router sends then to others than the gateway."""
    script.take()
    news = replace(_last(script), finish_reason="stop")
    script.decode(news=[news], ended=[ONE] if is_held else [])
    return [(name, message) for name, message in script.take() if name != GATEWAY]


def _last(script: Script) -> NewTokens:
    return NewTokens(ONE, len(script.state().output), ANSWER[-1:])


def has_let_go(script: Script) -> None:
    """The decode instance is told to forget it, and nothing is left when it has."""
    assert script.take_one(Abort, DECODE).keys == [ONE]
    script.gone(DECODE)
    is_gone(script)


def is_gone(script: Script) -> None:
    assert [message for name, message in script.take() if name == POOL] == [Release([ONE])]
    assert script.router.is_idle
    script.router.check_idle()


def is_gone_after_commit(script: Script, num_tokens: int) -> None:
    commit, release = [message for name, message in script.take() if name == POOL]
    assert isinstance(commit, Commit) and (commit.num_tokens, commit.is_candidate) == (num_tokens, False)
    assert release == Release([ONE]) and script.router.is_idle
    script.router.check_idle()


def test_the_pool_is_told_what_the_next_turn_awaits_and_what_a_prompt_brings() -> None:
    script = script_of()
    running(script, awaits="tool", owner="mine")
    _, (_, reserve) = end(script)
    assert isinstance(reserve, Reserve) and (reserve.awaits, reserve.owner) == ("tool", "mine")
    kinds = (("", False, ""), ("user", False, "user"), ("tool", True, "tool"))
    for number, (awaits, brings_results, follows) in enumerate(kinds, 2):
        wanted = replace(request(number, num_prompt=NUM_PROMPT), owner="mine")
        script.say(GATEWAY, Submit(replace(wanted, awaits=awaits, brings_results=brings_results)))
        asked = script.take_one(Reserve, POOL)
        # Also a first prompt is told with its owner, since kept blocks are shared out by owner.
        assert (asked.follows, asked.awaits, asked.owner) == (follows, "", "mine")


def test_the_pool_gets_what_it_lacks_and_keeps_it_without_the_request() -> None:
    script = script_of()
    running(script)
    (released, asked) = end(script)
    assert released == (POOL, Release([ONE]))
    to, reserve = asked
    assert to == POOL and isinstance(reserve, Reserve)
    tokens = [*range(NUM_PROMPT), *ANSWER[:-1]]
    assert reserve.hashes == block_hashes_of(tokens, BLOCK_SIZE) and len(reserve.hashes) == 3
    assert (reserve.num_tokens, reserve.is_optional) == (12, True)
    script.say(POOL, Reserved(ONE, pool_blocks(10, 11, 30), num_tokens=8))
    order = script.take_one(Evict, DECODE)
    assert (order.blocks, order.num_saved) == ([10, 11, 30], 8)
    script.decode(evicted=[(ONE, 12)])
    is_gone_after_commit(script, 12)


def test_its_client_has_the_end_at_once_and_it_counts_no_more() -> None:
    script = script_of()
    running(script)
    script.take()
    script.decode(news=[replace(_last(script), finish_reason="stop")], ended=[ONE])
    assert GATEWAY in [name for name, _ in script.take()]
    assert script.state().is_finished and script.router.state.counts.by_phase == {}
    assert not len(script.router.state.demand)


def test_without_room_it_is_let_go() -> None:
    script = script_of()
    running(script)
    end(script)
    script.say(POOL, Reserved(ONE, None))
    has_let_go(script)


@pytest.mark.parametrize(
    "options", [{"enable_prefix_caching": False}, {"window": 8}], ids=["no caching", "window"]
)
def test_what_no_later_prompt_could_use_is_let_go(options: dict[str, Any]) -> None:
    script = script_of(**options)
    running(script)
    assert end(script) == [(DECODE, Abort([ONE]))]


def test_with_a_window_an_answer_is_kept_where_all_of_it_is_saved() -> None:
    script = script_of(window=8, tile_tokens=4, saves_whole=True)
    running(script)
    end(script)
    script.say(POOL, Reserved(ONE, pool_blocks(10, 11, 30), num_tokens=8))
    script.take()
    script.decode(evicted=[(ONE, 12)])
    commit = next(message for _, message in script.take() if isinstance(message, Commit))
    # 12 tokens have KV there, and the next one attends to those from 5 on.
    assert (commit.num_tokens, commit.first_whole) == (12, 1)


def test_an_answer_within_a_block_is_let_go() -> None:
    script = script_of()
    wanted = replace(request(num_prompt=NUM_PROMPT), has_next_turn=True)
    script.say(GATEWAY, Submit(wanted))
    script.reserve()
    script.first_token(token=ANSWER[0])
    script.saved()
    script.chosen(1)
    script.decode(admitted=[ONE])
    # 11 tokens have KV.
    assert end(script) == [(DECODE, Abort([ONE]))]


def test_an_instance_that_holds_nothing_has_ended_it() -> None:
    script = script_of()
    running(script)
    assert end(script, is_held=False) == [(POOL, Release([ONE]))]
    assert script.router.is_idle


def test_a_copy_that_failed_leaves_nothing() -> None:
    script = script_of()
    running(script)
    end(script)
    script.say(POOL, Reserved(ONE, pool_blocks(10, 11, 30), num_tokens=8))
    script.take()
    script.gone(DECODE)
    is_gone(script)


@pytest.mark.parametrize("is_reserved", [False, True])
def test_the_decode_instance_dies(is_reserved: bool) -> None:
    script = script_of()
    running(script)
    end(script)
    if is_reserved:
        script.say(POOL, Reserved(ONE, pool_blocks(10, 11, 30), num_tokens=8))
        script.take()
    script.close(DECODE)
    is_gone(script)
    script.say(POOL, Reserved(ONE, pool_blocks(10, 11, 30), num_tokens=8))
    assert not script.take()


def test_the_pool_dies_before_it_answers() -> None:
    script = script_of()
    running(script)
    end(script)
    script.close(POOL)
    assert script.take_one(Abort, DECODE).keys == [ONE]
    script.connect(POOL, epoch=2, enable_prefix_caching=True)
    script.gone(DECODE)
    assert script.router.is_idle


def test_the_pool_dies_while_the_answer_is_saved() -> None:
    script = script_of()
    running(script)
    end(script)
    script.say(POOL, Reserved(ONE, pool_blocks(10, 11, 30), num_tokens=8))
    script.close(POOL)
    script.take()
    script.decode(evicted=[(ONE, 12)])
    assert script.router.is_idle


def test_a_victim_whose_answer_ends_before_its_order_comes_is_saved_as_far_as_it_may() -> None:
    script = script_of()
    running(script)
    script.decode(wants_evicted=[ONE])
    script.say(POOL, Reserved(ONE, pool_blocks(10, 11, 12, 13, 14), num_tokens=8))
    assert script.take_one(Evict, DECODE).key == ONE
    end(script)
    script.decode(evicted=[(ONE, 15)])
    is_gone_after_commit(script, 15)
    script.gone(DECODE)
    assert not script.take()


def test_an_answer_behind_kv_that_may_be_wrong_is_let_go() -> None:
    script = script_of()
    running(script)
    other = replace(request(2, num_prompt=NUM_PROMPT), has_next_turn=True)
    script.say(GATEWAY, Submit(other))
    script.reserve(2)
    script.first_token(2, finish_reason="error", error="NaN", is_spoilt=True)
    assert end(script) == [(DECODE, Abort([ONE]))]


@pytest.mark.parametrize("is_reserved", [False, True])
def test_an_answer_that_is_found_to_be_wrong_meanwhile_is_not_made_known(is_reserved: bool) -> None:
    script = script_of()
    running(script)
    script.say(GATEWAY, Submit(replace(request(2, num_prompt=NUM_PROMPT), has_next_turn=True)))
    script.reserve(2)
    end(script)
    reserved = Reserved(ONE, pool_blocks(10, 11, 30))
    if is_reserved:
        script.say(POOL, reserved)
    script.first_token(2, finish_reason="error", error="NaN", is_spoilt=True)
    if is_reserved:
        script.decode(evicted=[(ONE, 12)])
        assert not [message for _, message in script.take() if isinstance(message, Commit)]
    else:
        script.take()
        script.say(POOL, reserved)
        assert script.take_one(Abort, DECODE).keys == [ONE]


def test_its_gateway_dies() -> None:
    script = script_of()
    running(script)
    end(script)
    script.close(GATEWAY)
    script.say(POOL, Reserved(ONE, pool_blocks(10, 11, 30), num_tokens=8))
    assert script.take_one(Evict, DECODE).key == ONE
    assert script.state().phase is Phase.LEAVING


def test_a_victim_that_ends_before_the_pool_has_room_is_let_go() -> None:
    script = script_of()
    running(script)
    script.decode(wants_evicted=[ONE])
    assert script.state().phase is Phase.MAKING_ROOM
    sent = end(script)
    assert (DECODE, Abort([ONE])) in sent and not any(isinstance(message, Reserve) for _, message in sent)
    # The pool's answer to the victim's request comes too late.
    script.say(POOL, Reserved(ONE, pool_blocks(10, 11, 12, 13), num_tokens=8))
    assert not script.take()
