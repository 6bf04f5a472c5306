"""Best effort that exceeded its predicted length yields to requests that have not, and is later restored."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from alignedserve.kv.span import KvSpan
from alignedserve.kvpool.batch_builder import BatchLimits
from alignedserve.kvpool.quadtree import QuadTree
from alignedserve.kvpool.search import form_batch
from alignedserve.protocol.messages import Commit, Submit
from alignedserve.router.config import RouterConfig
from alignedserve.router.requests import Phase, RequestState
from alignedserve.router.router import Router
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.forecast import FORGIVEN_S, MAX_LEVEL, Forecast
from alignedserve.scheduling.island import Assign
from alignedserve.timing.deadlines import Deadlines
from alignedserve.types import Epoch, RequestKey
from tests.router.script import BLOCK_SIZE, GATEWAY, POOL, Script, hello, request

STARVATION_S = 2.0


def exceeded(level: int, at_s: float = 0.0) -> Forecast:
    """The forecast of an answer that has exceeded it so many times."""
    forecast = Forecast(1)
    for _ in range(level):
        forecast.advance(forecast.length, at_s)
    return forecast


# ---- decode: which requests the pool takes first ----


def running(script: Script, key: int, predicted_len: int) -> None:
    script.say(GATEWAY, Submit(replace(request(key), tier="be"), predicted_len=predicted_len))
    script.reserve(key, [10 * key, 10 * key + 1])
    script.first_token(key)
    script.saved(key)
    script.chosen(key)
    script.decode(admitted=[RequestKey(key)])


def evict(script: Script, key: int) -> None:
    script.decode(wants_evicted=[RequestKey(key)])
    script.reserve(key, [10 * key, 10 * key + 1])
    script.decode(evicted=[(RequestKey(key), script.state(key).num_tokens - 1)])


class TinyPool:
    """The pool's index. It yields one request at a time, though more of the same length wait."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._tree = QuadTree(KvSpan(BLOCK_SIZE))

    def hear(self) -> None:
        for to, message in self._script.take():
            if to == POOL and isinstance(message, Commit) and message.is_candidate:
                self._tree.insert(message.key, message.num_tokens, message.due_s, self._script.now)

    def take(self) -> list[int]:
        now, limits = self._script.now, BatchLimits(max_blocks=100, max_requests=1)
        keys = form_batch(self._tree, limits, now + 0.5, now - STARVATION_S)
        self._tree.take_batch(keys, now)
        return [int(key) for key in keys]


def returned(wait_s: float) -> list[int]:
    """The order in which two requests leave the pool: 1 has exceeded its prediction `wait_s` before it was evicted, and
    2, which was evicted a little later, has not."""
    script = Script(starvation_s=STARVATION_S)
    pool = TinyPool(script)
    for key, predicted_len in ((1, 2), (2, 100)):
        running(script, key, predicted_len)
        script.token(key)
    assert [script.state(key).demotion(script.now) for key in (1, 2)] == [1, 0]
    script.tick(wait_s)
    script.take()
    for key in (1, 2):
        evict(script, key)
        script.tick(0.1)
    pool.hear()
    return pool.take() + pool.take()


def test_a_request_that_exceeded_its_prediction_returns_after_one_that_has_not() -> None:
    assert returned(wait_s=1.0) == [2, 1]


def test_after_a_while_it_is_forgiven() -> None:
    assert returned(wait_s=FORGIVEN_S) == [1, 2]


def state(key: int, forecast: Forecast, **options: Any) -> RequestState:
    return RequestState(
        request(key),
        GATEWAY,
        Phase.QUEUED,
        options.get("arrived_s", 0.0),
        forecast=forecast,
        deadlines=Deadlines(),
        **options,
    )


@given(st.integers(0, 2 * MAX_LEVEL))
def test_none_starves_in_the_pool(level: int) -> None:
    """One request a second comes that has not exceeded its prediction, and one a second goes."""
    script = Script(starvation_s=STARVATION_S)
    policy, island = script.router.policy, script.router.state.island
    tree, waiting_s = QuadTree(KvSpan(BLOCK_SIZE)), 0.0

    def insert(each: RequestState) -> None:
        tree.insert(each.key, 7, policy.admission_due_s(each, island), script.now)

    insert(state(1, exceeded(level)))
    for key in range(2, 200):
        insert(state(key, Forecast(100), arrived_s=script.now))
        keys = form_batch(tree, BatchLimits(100, 1), script.now + 0.5, script.now - STARVATION_S)
        tree.take_batch(keys, script.now)
        if keys == [1]:
            break
        waiting_s += 1.0
        script.tick(1.0)
    assert waiting_s <= MAX_LEVEL * FORGIVEN_S + STARVATION_S


def test_evicted_requests_return_to_a_colocated_instance_in_that_order() -> None:
    router = Router(RouterConfig(link="host"), Epoch(1), SchedulingConfig())
    router.state.cluster.add(hello("colocated-0"))
    for key, level in ((1, 2), (2, 0), (3, 1), (4, 0)):
        each = state(key, exceeded(level))
        router.state.requests.add(each)
        router.state.decode_queue.add(each)

    def order(now: float) -> list[int]:
        router.state.clock.now = now
        (assign,) = router.policy.decide(router.state.island)
        assert isinstance(assign, Assign)
        return [each.key for each in assign.requests]

    assert order(0.0) == [2, 4, 3, 1]
    assert order(FORGIVEN_S) == [2, 3, 4, 1]
    assert order(2 * FORGIVEN_S) == [1, 2, 3, 4]


# ---- prefill ----


def queued(*states: RequestState) -> Router:
    router = Router(RouterConfig(link="host"), Epoch(1), SchedulingConfig())
    router.state.cluster.add(hello("prefill-0"))
    for each in states:
        router.state.requests.add(each)
        router.state.prefill_queue.push(each, router.policy.urgency(each, router.state.island))
    return router


def test_a_prompt_that_is_computed_again_yields_as_well() -> None:
    """It is as if the request had come when all will be forgiven."""
    router = queued(
        state(1, exceeded(1)),
        state(2, Forecast(4), arrived_s=FORGIVEN_S - 1.0),
        state(3, Forecast(4), arrived_s=FORGIVEN_S + 1.0),
    )
    router.state.clock.now = FORGIVEN_S + 1.0
    assert [each.key for each in router.policy.start(router.state.island)] == [2, 1, 3]


@given(st.integers(0, 2 * MAX_LEVEL))
def test_none_starves_in_the_queue_for_prefill(level: int) -> None:
    """One prompt a second comes whose answer has not exceeded its prediction, and one a second goes."""
    router = queued(state(1, exceeded(level)))
    queue, policy, island = router.state.prefill_queue, router.policy, router.state.island
    for key in range(2, 200):
        router.state.clock.now = float(key - 1)
        each = state(key, Forecast(4), arrived_s=router.state.clock.now)
        router.state.requests.add(each)
        queue.push(each, policy.urgency(each, island))
        first = queue.first(policy.line(is_rt=False), router.state.clock.now)
        assert first is not None
        if first.key == 1:
            break
        queue.take(first)
    assert router.state.clock.now <= MAX_LEVEL * FORGIVEN_S + 1.0


def test_real_time_does_not_yield() -> None:
    """Its deadlines say what is urgent."""
    script = Script()
    script.say(GATEWAY, Submit(request(1), predicted_len=1))
    late = script.state(1)
    late.forecast = exceeded(3)
    policy, island = script.router.policy, script.router.state.island
    urgency, due_s = policy.urgency(late, island), policy.admission_due_s(late, island)
    late.forecast = Forecast(100)
    assert late.is_rt and urgency == policy.urgency(late, island)
    assert due_s == policy.admission_due_s(late, island)
