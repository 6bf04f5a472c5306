"""The engine's output comes to the requests in order: real time first, and joined where it waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from alignedserve.gateway.islands.output_queue import (
    MAX_JOINED_TOKENS,
    MAX_TOLD_AT_ONCE,
    MAX_TOLD_WITH_LOGPROBS_AT_ONCE,
    News,
    OutputQueue,
)
from alignedserve.protocol.messages import NewTokens, PromptProgress, Rejected, Request
from alignedserve.protocol.prompt_logprobs import TokenLogprobs
from alignedserve.sampling_params import SamplingParams
from alignedserve.types import RequestKey


class Crowd:
    """Requests, and what each of them was told."""

    def __init__(self) -> None:
        self.outputs = OutputQueue()
        self.told: list[tuple[int, News]] = []

    def put(self, number: int, news: News, tier: str = "rt", num_logprobs: int | None = None) -> None:
        params = SamplingParams(logprobs=num_logprobs)
        request = Request(RequestKey(number), [1], params, seed=0, arrival_s=0.0, tier=tier)
        self.outputs.put(request, "", lambda told: self.told.append((number, told)), news)

    def fill_the_turn(self) -> None:
        """Whatever is put after this in the same turn of the event loop waits."""
        for number in range(1000, 1000 + MAX_TOLD_AT_ONCE):
            self.put(number, tokens(0, 1))
        self.told.clear()

    async def until_told(self) -> None:
        while self.outputs.num_waiting:
            await asyncio.sleep(0)

    def of(self, number: int) -> list[News]:
        return [news for each, news in self.told if each == number]


def tokens(first: int, count: int, finish_reason: str | None = None) -> NewTokens:
    return NewTokens(RequestKey(1), first, [*range(first, first + count)], finish_reason=finish_reason)


def play(scenario: Callable[[Crowd], Callable[[], None] | None]) -> None:
    async def playing() -> None:
        crowd = Crowd()
        crowd.fill_the_turn()
        check = scenario(crowd)
        await crowd.until_told()
        if check:
            check()

    asyncio.run(playing())


def test_real_time_comes_before_best_effort_that_waits_longer() -> None:
    """Of a thousand best-effort requests, only one in each turn comes before."""

    def scenario(crowd: Crowd) -> Callable[[], None]:
        for number in range(200):
            crowd.put(number, tokens(0, 1), "be", num_logprobs=2 if number % 2 else None)
        for number in range(200, 240):
            crowd.put(number, tokens(0, 1), num_logprobs=2 if number % 2 else None)

        def check() -> None:
            order = [number for number, _ in crowd.told]
            last = max(order.index(number) for number in range(200, 240))
            num_turns = 40 / MAX_TOLD_WITH_LOGPROBS_AT_ONCE
            assert 0 < sum(number < 200 for number in order[:last]) <= num_turns
            assert len(order) == 240

        return check

    play(scenario)


def test_tokens_that_wait_are_joined_and_nothing_of_them_is_lost() -> None:
    logprobs: list[TokenLogprobs] = [(-0.5, 1, {7: -0.5}), (-1.5, 2, {7: -0.5}), (-2.5, 3, {7: -0.5})]

    def scenario(crowd: Crowd) -> Callable[[], None]:
        first = NewTokens(RequestKey(1), 0, [10], logprobs[:1], prompt_logprobs=b"packed", num_reused=5)
        crowd.put(1, first)
        crowd.put(1, NewTokens(RequestKey(1), 1, [11], logprobs[1:2]))
        crowd.put(2, tokens(0, 1))
        crowd.put(1, NewTokens(RequestKey(1), 2, [12], logprobs[2:], "stop", stop_reason=12))
        assert crowd.outputs.num_waiting == 2

        def check() -> None:
            all_of_it = NewTokens(
                RequestKey(1), 0, [10, 11, 12], logprobs, "stop", 12, prompt_logprobs=b"packed", num_reused=5
            )
            assert crowd.of(1) == [all_of_it] and crowd.of(2) == [tokens(0, 1)]

        return check

    play(scenario)


def test_what_waits_grows_with_a_sixteenth_of_the_tokens() -> None:
    num_requests, num_iterations = 50, 4 * MAX_JOINED_TOKENS

    def scenario(crowd: Crowd) -> Callable[[], None]:
        for iteration in range(num_iterations):
            for number in range(num_requests):
                crowd.put(number, tokens(iteration, 1))
        # A piece with many tokens would hold up the others in its turn.
        assert crowd.outputs.num_waiting == num_requests * num_iterations / MAX_JOINED_TOKENS

        def check() -> None:
            for number in range(num_requests):
                found = [news for news in crowd.of(number) if isinstance(news, NewTokens)]
                assert [token for news in found for token in news.tokens] == [*range(num_iterations)]
                assert [news.first for news in found] == [*range(0, num_iterations, MAX_JOINED_TOKENS)]

        return check

    play(scenario)


def test_only_the_last_progress_of_a_prompt_is_told() -> None:
    def scenario(crowd: Crowd) -> Callable[[], None]:
        for num_computed in (100, 200, 300):
            crowd.put(1, PromptProgress(RequestKey(1), 300, num_computed, 0, 0.1))
        crowd.put(1, tokens(0, 1))

        def check() -> None:
            assert crowd.of(1) == [PromptProgress(RequestKey(1), 300, 300, 0, 0.1), tokens(0, 1)]

        return check

    play(scenario)


@pytest.mark.parametrize(
    "end",
    [
        NewTokens(RequestKey(1), 2, [], finish_reason="error", error="the router is down"),
        NewTokens(RequestKey(1), 2, [], finish_reason="abort"),
        Rejected(RequestKey(1), "too_long", "it can never fit"),
    ],
)
def test_what_came_before_an_error_is_told_before_it(end: News) -> None:
    def scenario(crowd: Crowd) -> Callable[[], None]:
        crowd.put(1, tokens(0, 2))
        crowd.put(1, end)

        def check() -> None:
            assert crowd.of(1) == [tokens(0, 2), end]

        return check

    play(scenario)


def test_what_comes_alone_is_told_at_once() -> None:
    async def scenario() -> None:
        crowd = Crowd()
        crowd.put(1, tokens(0, 1), "be")
        crowd.put(2, tokens(0, 1))
        assert [number for number, _ in crowd.told] == [1, 2] and not crowd.outputs.num_waiting

    asyncio.run(scenario())
