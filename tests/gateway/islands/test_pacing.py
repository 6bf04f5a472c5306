"""Best effort and aborts leave a few at a time, and real time passes them on the way to the router."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest

from alignedserve.gateway.generation.generation import NUM_AT_ONCE
from alignedserve.gateway.islands.islands import NUM_CLOSED_AT_ONCE, Islands
from alignedserve.gateway.islands.pacing import MAX_AHEAD, MAX_WAITING, REST, SubmissionPacer
from alignedserve.gateway.telemetry.telemetry import Telemetry
from alignedserve.protocol.messages import Abort, Echo, Message
from alignedserve.types import InstanceId, RequestKey
from tests.gateway.scripted import ScriptedRouter
from tests.gateway.served import play, served


class Paced:
    """What a router hears, and when: it answers when it is told to, `took_s` after it was asked."""

    def __init__(self) -> None:
        self.heard: list[Message | int] = []
        self.now = 0.0
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.pacing = SubmissionPacer(
            self.heard.append, lambda seconds, then: self.timers.append((seconds, then)), lambda: self.now
        )

    def submit(self, *keys: int) -> None:
        for key in keys:
            self.pacing.submit(RequestKey(key), lambda key=key: self.heard.append(key))  # type: ignore[misc]

    def abort(self, *keys: int) -> list[bool]:
        return [self.pacing.abort(RequestKey(key)) for key in keys]

    def take(self) -> list[int]:
        """Requests that it has heard of; of aborted ones, below zero."""
        heard, self.heard[:] = self.heard[:], [each for each in self.heard if isinstance(each, Echo)]
        numbers: list[int] = []
        for each in heard:
            numbers += [-key for key in each.keys] if isinstance(each, Abort) else []
            numbers += [each] if isinstance(each, int) else []
        return numbers

    def answer(self, took_s: float = 0.002) -> float:
        """How long the rest after that is."""
        (echo,) = [each for each in self.heard if isinstance(each, Echo)]
        self.heard.clear()
        self.now += took_s
        self.pacing.answered(echo)
        ((rest_s, then),) = self.timers
        self.timers.clear()
        then()
        return rest_s


def test_never_more_than_a_few_are_with_the_router() -> None:
    paced = Paced()
    paced.submit(*range(100))
    taken = paced.take()
    assert taken == [*range(MAX_AHEAD)]
    while len(taken) < 100:
        assert paced.answer() == pytest.approx(REST * 0.002)
        some = paced.take()
        assert 0 < len(some) <= MAX_AHEAD
        taken += some
    assert taken == [*range(100)]


def test_the_rest_is_as_long_as_the_router_is_slow() -> None:
    paced = Paced()
    paced.submit(*range(100))
    assert paced.answer(took_s=0.5) == pytest.approx(REST * 0.5)


def test_aborts_leave_before_submissions_and_take_back_what_has_not_left() -> None:
    paced = Paced()
    paced.submit(*range(40))
    paced.take()
    assert paced.abort(30, 3, 31, 4) == [False, True, False, True]
    paced.answer()
    # Both are aborted by one message.
    assert paced.take() == [-3, -4, *range(MAX_AHEAD, 30), 32]
    paced.answer()
    assert paced.take() == [*range(33, 40)]


def test_thousands_of_aborts_take_a_few_messages() -> None:
    paced = Paced()
    paced.abort(*range(1, 4601))
    num_messages, num_rounds, taken = 0, 0, list[int]()
    while len(taken) < 4600:
        num_messages += sum(isinstance(each, Abort) for each in paced.heard)
        taken += paced.take()
        if len(taken) < 4600:
            paced.answer()
            num_rounds += 1
    assert num_messages <= MAX_AHEAD + 5 and num_rounds == 1
    assert sorted(taken) == [-key for key in range(4600, 0, -1)]


def test_an_answer_on_a_connection_that_is_gone_means_nothing() -> None:
    paced = Paced()
    paced.submit(*range(40))
    (old,) = [each for each in paced.heard if isinstance(each, Echo)]
    paced.heard.clear()
    paced.pacing.forget()
    paced.submit(*range(40, 80))
    assert paced.take() == [*range(40, 40 + MAX_AHEAD)]
    paced.pacing.answered(old)
    assert not paced.timers and not paced.take()


class Closing(Islands):
    """Notes in which turn of the event loop each is closed."""

    def __init__(self) -> None:
        super().__init__((), InstanceId("gateway-0"), {}, Telemetry())
        self.turn = 0
        self.closed: list[int] = []

    def close(self, key: RequestKey, reason: str = "abort") -> None:
        self.closed.append(self.turn)


def test_thousands_are_closed_in_many_turns_of_the_loop() -> None:
    async def scenario() -> None:
        islands = Closing()
        for call in range(16):
            islands.close_all([RequestKey(256 * call + number) for number in range(256)])
        while len(islands.closed) < 16 * 256:
            await asyncio.sleep(0)
            islands.turn += 1
        assert max(Counter(islands.closed).values()) <= NUM_CLOSED_AT_ONCE
        islands.close_all([RequestKey(1)])
        assert islands.closed[-1] == islands.turn, "a few at once"

    play(scenario)


# ---- on sockets ----


class SlowRouter(ScriptedRouter):
    """Takes what comes, and lets nobody go on."""

    def __init__(self) -> None:
        super().__init__()
        self.allowed = 0
        self.is_slow = True
        self.held: list[tuple[InstanceId, Echo]] = []

    def echo(self, sender: InstanceId, echo: Echo) -> None:
        if self.is_slow:
            self.held.append((sender, echo))
        else:
            super().echo(sender, echo)

    def go_on(self) -> None:
        self.is_slow = False
        for held in self.held:
            super().echo(*held)

    @property
    def num_submitted(self) -> dict[str, int]:
        tiers = [submit.request.tier for submit in self.submitted]
        return {tier: tiers.count(tier) for tier in ("rt", "be")}


FLEX = {"prompt": "x", "n": 256, "service_tier": "flex"}


def test_real_time_passes_best_effort_that_came_before() -> None:
    async def scenario() -> None:
        router = SlowRouter()
        async with served(router) as at:
            calls = [asyncio.create_task(at.post("/v1/completions", FLEX)) for _ in range(3)]
            await router.until(lambda: bool(router.held))
            urgent = asyncio.create_task(at.post("/v1/completions", {"prompt": "y"}))
            await router.until(lambda: router.num_submitted["rt"] == 1)
            assert router.num_submitted["be"] == MAX_AHEAD
            router.go_on()
            router.allow(None)
            assert (await urgent).status_code == 200
            assert [(await call).status_code for call in calls] == [200] * 3
            assert router.num_submitted["be"] == 3 * 256

    play(scenario)


def test_what_has_not_left_when_its_client_leaves_never_does() -> None:
    async def scenario() -> None:
        router = SlowRouter()
        async with served(router) as at:
            call = asyncio.create_task(at.post("/v1/completions", FLEX))
            await router.until(lambda: router.num_submitted["be"] == MAX_AHEAD)
            (island,) = at.process._islands._islands.values()
            while island.num_open <= MAX_AHEAD:
                await asyncio.sleep(0.01)
            call.cancel()
            while island.num_open:
                await asyncio.sleep(0.01)
            router.go_on()
            router.allow(None)
            assert (await at.post("/v1/completions", FLEX | {"n": 2})).status_code == 200
            await router.until(lambda: len(router.aborted) == MAX_AHEAD)
            assert router.num_submitted["be"] <= MAX_AHEAD + 2

    play(scenario)


def test_a_call_opens_no_more_than_can_leave_soon() -> None:
    async def scenario() -> None:
        router = SlowRouter()
        async with served(router) as at:
            call = asyncio.create_task(at.post("/v1/completions", FLEX))
            await router.until(lambda: bool(router.held))
            assert (await at.http.get("/health")).status_code == 200
            (island,) = at.process._islands._islands.values()
            assert island.num_open <= MAX_AHEAD + MAX_WAITING + NUM_AT_ONCE
            call.cancel()

    play(scenario)


def test_best_effort_that_waits_for_a_router_goes_on_with_the_next_one() -> None:
    async def scenario() -> None:
        router = SlowRouter()
        async with served(router) as at:
            call = asyncio.create_task(at.post("/v1/completions", FLEX))
            await router.until(lambda: bool(router.held))
            router.hub.close()
            second = ScriptedRouter(epoch=2)
            await second.hub.listen("127.0.0.1", at.router_port)
            answer = await call
            assert len(answer.json()["choices"]) == 256
            second.hub.close()

    play(scenario)
