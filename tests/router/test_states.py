"""Requests of a model with states: the one in a request's last column is replaced when more of its KV is saved, so the
router trusts none until that is reported."""

from __future__ import annotations

from typing import Any

import pytest

from alignedserve.kv.groups import STATE_WINDOW
from alignedserve.protocol.messages import Commit, Evict, Failed, Prefill, Release, Reserve, Reserved, Stored
from tests.router.script import BLOCK_SIZE, DECODE, GATEWAY, ONE, POOL, PREFILL, Script, pool_blocks

STATES: dict[str, Any] = {"window": STATE_WINDOW, "tile_tokens": 1, "has_state": True}
# The pool has the KV of 6 tokens, so that the second column is not complete, or of 8.
in_part_or_whole = pytest.mark.parametrize("num_saved", [6, 8])


def island() -> Script:
    script = Script(connect=False)
    for name in (POOL, PREFILL, DECODE):
        script.connect(name, **STATES)
    script.connect(GATEWAY)
    script.take()
    return script


def evicting(num_saved: int) -> Script:
    """A request that has told one more token goes back to the pool."""
    script = island()
    script.running(num_prompt=num_saved)
    script.token(wants_evicted=[ONE])
    script.reserve()
    # The instance saves what follows, or all of the last column.
    assert script.take_one(Evict, DECODE).num_saved == num_saved
    return script


def check_goes_on(script: Script, num_saved: int) -> None:
    """It goes on with the KV of complete columns only, and what is left of other KV is given back."""
    lasting = 0 if num_saved % BLOCK_SIZE else num_saved
    sent = [message for name, message in script.take() if name == POOL]
    assert [message.num_tokens for message in sent if isinstance(message, Commit)] == [lasting][: lasting > 0]
    assert any(isinstance(message, Release) for message in sent) is not bool(lasting)
    script.reserve()
    assert script.take_one(Prefill, PREFILL).works[0].num_cached == lasting


@in_part_or_whole
def test_a_decode_instance_dies_while_it_evicts(num_saved: int) -> None:
    script = evicting(num_saved)
    script.close(DECODE)
    check_goes_on(script, num_saved)


@in_part_or_whole
def test_an_eviction_fails_and_its_instance_dies_later(num_saved: int) -> None:
    script = evicting(num_saved)
    script.decode()
    script.say(DECODE, Failed(ONE, "evict", "no"))
    script.tick(1.0)
    script.take()
    script.close(DECODE)
    check_goes_on(script, num_saved)


@in_part_or_whole
def test_what_was_evicted_counts_again(num_saved: int) -> None:
    script = evicting(num_saved)
    script.decode(evicted=[(ONE, num_saved + 1)])
    assert script.take_one(Commit, POOL).num_tokens == num_saved + 1


@in_part_or_whole
@pytest.mark.parametrize("dies", [True, False])
def test_a_prefill_instance_dies_or_can_t_save_what_it_went_on_with(num_saved: int, dies: bool) -> None:
    script = island()
    script.running(num_prompt=num_saved)
    script.token()
    script.take()
    script.close(DECODE)
    script.reserve()
    assert script.take_one(Prefill, PREFILL).works[0].num_cached == num_saved
    if dies:
        script.close(PREFILL)
        script.connect(PREFILL, epoch=2, **STATES)
    else:
        script.say(PREFILL, Failed(ONE, "save", "no"))
        script.tick(1.0)
    check_goes_on(script, num_saved)


def test_room_that_was_granted_in_vain_costs_the_state() -> None:
    """The victim is no longer named while the pool grants what it has asked for again."""
    script = island()
    script.running(num_prompt=6)
    script.token(wants_evicted=[ONE])
    script.say(POOL, Reserved(ONE, None))
    script.tick(0.1)
    script.token()
    script.reserve()
    script.token(wants_evicted=[ONE])
    script.say(POOL, Reserved(ONE, pool_blocks(20, 21, 22, 23)))
    order = script.take_one(Evict, DECODE)
    assert (order.num_saved, order.blocks) == (0, [20, 21, 22, 23])


def test_an_instance_dies_before_it_is_known_that_room_was_granted_in_vain() -> None:
    script = island()
    script.running(num_prompt=6)
    script.decode(wants_evicted=[ONE])
    script.say(POOL, Reserved(ONE, None))
    script.tick(0.1)
    script.decode()
    script.take()
    script.close(DECODE)
    check_goes_on(script, 6)


@pytest.mark.parametrize(("num_saved", "num_usable"), [(6, 6), (7, 0)])
def test_a_new_router_uses_no_state_that_later_tokens_have_changed(num_saved: int, num_usable: int) -> None:
    """An earlier router may have received more of the request's tokens than its gateway."""
    script = Script(connect=False)
    script.connect(POOL, inventory=[Stored(ONE, pool_blocks(10, 11), num_saved)], **STATES)
    for name in (PREFILL, GATEWAY):
        script.connect(name, **STATES)
    script.submit(num_prompt=7)
    assert script.take_one(Reserve, POOL).key == ONE
    script.reserve()
    assert script.take_one(Prefill, PREFILL).works[0].num_cached == num_usable
