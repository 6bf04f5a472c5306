"""What gateways hear of best effort, and when."""

from __future__ import annotations

from typing import Any

import pytest

from alignedserve.protocol.messages import Abort, NewTokens, Request, Submit, Tokens
from alignedserve.router.outbox import MAX_COALESCED_TOKENS, MAX_DELAY_S
from alignedserve.sampling_params import SamplingParams
from alignedserve.types import RequestKey
from tests.router.script import GATEWAY, PREFILL, Script, prefill_report

ONE, TWO = RequestKey(1), RequestKey(2)


def submit(
    script: Script,
    key: RequestKey = ONE,
    tier: str = "be",
    delivered: list[int] | None = None,
    **params: Any,
) -> None:
    asked = SamplingParams(max_tokens=100, **params)
    request = Request(key, [1, 2, 3, 4, 5, 6], asked, seed=0, arrival_s=0.0, tier=tier)
    script.say(GATEWAY, Submit(request, delivered or []))


def begun(tier: str = "be", **params: Any) -> Script:
    """The request has its first token, and its gateway has not heard of it."""
    script = Script()
    submit(script, tier=tier, **params)
    script.reserve()
    script.first_token()
    return script


def heard(script: Script) -> list[NewTokens]:
    return [
        news
        for name, message in script.take()
        if name == GATEWAY and isinstance(message, Tokens)
        for news in message.news
    ]


def tokens(script: Script, *tokens: int, **news: object) -> None:
    """More of them, one report each."""
    for token in tokens:
        first = len(script.state().output)
        script.say(PREFILL, prefill_report(news=[NewTokens(ONE, first, [token], **news)]))  # type: ignore[arg-type]


def test_best_effort_is_told_some_at_a_time() -> None:
    script = begun()
    tokens(script, *range(51, 50 + MAX_COALESCED_TOKENS - 1))
    assert heard(script) == []
    tokens(script, 99)
    assert heard(script) == [NewTokens(ONE, 0, [*range(50, 50 + MAX_COALESCED_TOKENS - 1), 99])]
    tokens(script, 60)
    assert heard(script) == []


def test_real_time_is_told_at_once() -> None:
    script = begun(tier="rt")
    assert heard(script) == [NewTokens(ONE, 0, [50])]
    tokens(script, 51)
    assert heard(script) == [NewTokens(ONE, 1, [51])]


@pytest.mark.parametrize("stop", ["a", ["a", "b"]])
def test_where_a_gateway_may_find_the_end_it_is_told_at_once(stop: str | list[str]) -> None:
    assert heard(begun(stop=stop)) == [NewTokens(ONE, 0, [50])]


def test_the_end_is_told_with_all_before_it() -> None:
    script = begun(logprobs=0)
    tokens(script, 51, logprobs=[(-0.5, 1, {})])
    assert heard(script) == []
    tokens(script, 52, logprobs=[(-0.25, 1, {})], finish_reason="stop", stop_reason=52)
    (news,) = heard(script)
    assert (news.first, news.tokens, news.finish_reason, news.stop_reason) == (0, [50, 51, 52], "stop", 52)
    assert news.logprobs == [(-0.5, 1, {}), (-0.25, 1, {})]


def test_none_waits_for_long() -> None:
    script = begun()
    script.tick(MAX_DELAY_S / 2)
    tokens(script, 51)
    assert heard(script) == []
    script.tick(MAX_DELAY_S / 2)
    assert heard(script) == [NewTokens(ONE, 0, [50, 51])]
    script.tick(MAX_DELAY_S)
    assert heard(script) == []


def test_a_gateway_that_asks_again_hears_each_token_once() -> None:
    script = begun()
    tokens(script, 51, 52)
    submit(script, delivered=[50])
    assert heard(script) == [NewTokens(ONE, 1, [51, 52])]
    script.tick(2 * MAX_DELAY_S)
    assert heard(script) == []
    tokens(script, 53)
    script.tick(MAX_DELAY_S)
    assert heard(script) == [NewTokens(ONE, 3, [53])]


def test_a_request_that_was_aborted_is_not_heard_of() -> None:
    script = begun()
    script.say(GATEWAY, Abort([ONE]))
    heard(script)
    script.tick(2 * MAX_DELAY_S)
    assert heard(script) == []
