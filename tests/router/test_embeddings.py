"""Requests for embeddings: to an instance that computes prompts, without the pool, until they end there."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from alignedserve.protocol.messages import (
    Abort,
    NewTokens,
    Offer,
    Prefill,
    Rejected,
    Release,
    Reserve,
    Submit,
    Tokens,
)
from alignedserve.router.requests import Phase
from tests.router.script import DECODE, GATEWAY, ONE, POOL, PREFILL, Script, prefill_report, request

COLOCATED = "colocated-0"
VECTOR = b"\x00\x00\x80?"
END = NewTokens(ONE, 0, [], finish_reason="stop", embedding=VECTOR)


def submit(script: Script, num_prompt: int = 6, tier: str = "rt", pooling: str = "last") -> None:
    wanted = request(num_prompt=num_prompt, max_tokens=1)
    script.say(GATEWAY, Submit(replace(wanted, tier=tier, pooling=pooling)))


@pytest.mark.parametrize("tier", ["rt", "be"])
def test_it_goes_to_a_prefill_instance_and_ends_there(tier: str) -> None:
    script = Script()
    submit(script, tier=tier)
    sent = script.take()
    assert [(to, type(message)) for to, message in sent] == [(PREFILL, Prefill)]
    script.say(PREFILL, prefill_report(news=[END]))
    sent = script.take()
    (tokens,) = [message for _, message in sent if isinstance(message, Tokens)]
    assert tokens.news == [END] and ONE in tokens.timelines
    assert (PREFILL, Abort([ONE])) in sent and not any(to == DECODE for to, _ in sent)
    script.gone(PREFILL)
    script.router.check_idle()


def test_its_length_teaches_nothing() -> None:
    """The mean of answers' lengths says what best effort will need in the pool."""
    script = Script()
    submit(script)
    script.say(PREFILL, prefill_report(news=[END]))
    assert script.router.state.demand._mean_output == {} and not len(script.router.state.demand)


def test_a_colocated_instance_is_offered_it() -> None:
    script = Script(connect=False)
    for name in (POOL, COLOCATED, GATEWAY):
        script.connect(name)
    script.take()
    submit(script)
    (offer,) = [message for to, message in script.take() if isinstance(message, Offer) and to == COLOCATED]
    assert [work.request.key for work in offer.works] == [ONE]


def test_it_is_as_long_as_the_model_allows_and_no_longer() -> None:
    script = Script()
    submit(script, num_prompt=200)
    assert any(isinstance(message, Prefill) for _, message in script.take())
    script = Script()
    submit(script, num_prompt=201)
    assert script.take_one(Rejected, GATEWAY).reason == "too_long"


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_its_instance_dies_and_another_begins_again(pooling: str) -> None:
    script = Script()
    submit(script, pooling=pooling)
    script.say(PREFILL, prefill_report(progress=[(ONE, 4, 0)]))
    script.connect("prefill-1")
    script.take()
    script.close(PREFILL)
    sent = script.take()
    (order,) = [message for to, message in sent if isinstance(message, Prefill) and to == "prefill-1"]
    assert [(work.num_cached, work.blocks) for work in order.works] == [(0, [])]
    assert not any(isinstance(message, Reserve) for _, message in sent)


def test_what_the_dead_said_last_counts_and_nobody_computes_it_again() -> None:
    script = Script()
    submit(script)
    script.say(PREFILL, prefill_report(news=[END]))
    script.take()
    script.close(PREFILL)
    assert not any(isinstance(message, Prefill) for _, message in script.take())
    script.router.check_idle()


def test_its_client_leaves() -> None:
    script = Script()
    submit(script)
    script.take()
    script.say(GATEWAY, Abort([ONE]))
    assert script.take_one(Abort, PREFILL).keys == [ONE]
    assert script.state().phase is Phase.LEAVING
    # This was on its way.
    script.say(PREFILL, prefill_report(news=[END]))
    assert not any(isinstance(m, Tokens) and m.news for _, m in script.take())
    script.gone(PREFILL)
    assert script.take_one(Release, POOL).keys == [ONE]
    script.router.check_idle()
