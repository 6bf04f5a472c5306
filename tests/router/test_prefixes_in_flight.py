"""Requests with a prefix that another one brings to the pool wait for it, and for nothing else, and not for ever."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from alignedserve.protocol.messages import Abort, Failed, Moved, Prefill, Reserve, Reserved, Submit
from alignedserve.router.prefixes_in_flight import PrefixesInFlight
from alignedserve.router.requests import Phase, RequestState
from alignedserve.sampling_params import SamplingParams
from alignedserve.scheduling.prefixes import TOKENS_PER_HASH
from alignedserve.timing.deadlines import Deadlines
from alignedserve.types import RequestKey
from tests.router.script import GATEWAY, POOL, PREFILL, Script, pool_blocks, prefill_report, request

NUM_COMMON = 2 * TOKENS_PER_HASH
NUM_OWN = 20


def script_of(*prefills: str, enable_prefix_caching: bool = True, **scheduling: Any) -> Script:
    script = Script(connect=False, **{"prefill_window": 1000} | scheduling)
    for name in (POOL, *(prefills or (PREFILL,)), "decode-0", GATEWAY):
        script.connect(name, num_blocks=10_000, enable_prefix_caching=enable_prefix_caching)
    script.take()
    return script


def prompt(key: int, num_common: int = NUM_COMMON, num_own: int = NUM_OWN, kind: int = 7) -> list[int]:
    return [kind] * num_common + [key] * num_own


def submit(script: Script, *keys: int, tier: str = "be", max_tokens: int = 10, **parts: Any) -> None:
    for key in keys:
        one = replace(request(key, max_tokens=max_tokens), tier=tier, prompt=prompt(key, **parts))
        script.say(GATEWAY, Submit(one))


def reserved(script: Script, *keys: int, num_found: int = 0) -> None:
    for key in keys:
        num_blocks = -(-script.state(key).num_tokens // 4)
        blocks = pool_blocks(*range(1000 * key, 1000 * key + num_blocks))
        script.say(POOL, Reserved(RequestKey(key), blocks, num_tokens=num_found, num_found=num_found))


def asked(script: Script) -> list[int]:
    """The requests for which room in the pool was asked for since the last time."""
    return [int(message.key) for _, message in script.take() if isinstance(message, Reserve)]


def waiting(script: Script) -> int:
    script.router.state.prefill_queue.check()
    return script.router.state.prefill_queue.prefixes.num_waiting


# ---- the usual way ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["aligned", "fcfs", "priority", "sarathi"])
def test_lines_wait_until_the_first_of_them_is_in_the_pool(policy: str) -> None:
    script = script_of(policy=policy)
    submit(script, 1, 2, 3)
    assert (asked(script), waiting(script)) == ([1], 2)
    reserved(script, 1)
    script.first_token(1)
    assert (asked(script), waiting(script)) == ([], 2)
    script.saved(1)
    assert (asked(script), waiting(script)) == ([2, 3], 0)
    reserved(script, 2, 3, num_found=NUM_COMMON)
    works = [work for _, each in script.take() if isinstance(each, Prefill) for work in each.works]
    assert [work.num_cached for work in works] == [NUM_COMMON, NUM_COMMON]


def test_others_go_ahead_of_those_that_wait() -> None:
    script = script_of()
    submit(script, 1, 2)
    submit(script, 3, kind=8)
    submit(script, 4)
    assert asked(script) == [1, 3]


def test_those_that_waited_start_in_their_order() -> None:
    script = script_of(prefill_window=1)
    submit(script, 1, 2, 3, 4)
    submit(script, 5, kind=8)
    reserved(script, 1)
    script.first_token(1)
    # Its tokens are computed, and its KV is not saved yet: there is room for another prompt.
    assert asked(script) == [1, 5]
    reserved(script, 5)
    script.first_token(5)
    script.saved(1)
    assert asked(script) == [2]


def test_real_time_waits_for_nothing_and_is_waited_for() -> None:
    script = script_of()
    submit(script, 1)
    submit(script, 2, tier="rt")
    assert asked(script) == [1, 2]
    script = script_of()
    submit(script, 1, tier="rt")
    submit(script, 2)
    assert asked(script) == [1]


def test_a_prompt_that_is_handed_over_brings_its_prefix_until_it_is_saved() -> None:
    script = script_of(link="nccl")
    submit(script, 1, tier="rt")
    submit(script, 2)
    reserved(script, 1)
    script.first_token(1)
    script.say(PREFILL, prefill_report(held=[RequestKey(1)]))
    assert script.state(1).phase is Phase.OFFERED
    assert asked(script) == [1]
    script.saved(1)
    assert asked(script) == [2]


def test_nothing_waits_for_what_the_pool_has_already() -> None:
    script = script_of()
    submit(script, 1, 2, 3)
    assert asked(script) == [1]
    reserved(script, 1, num_found=NUM_COMMON)
    assert (asked(script), waiting(script)) == ([2, 3], 0)


def test_what_follows_a_prefix_in_the_pool_is_waited_for() -> None:
    script = script_of()
    submit(script, 1, 2)
    assert asked(script) == [1]
    reserved(script, 1, num_found=TOKENS_PER_HASH)
    assert (asked(script), waiting(script)) == ([], 1)
    script.first_token(1)
    script.saved(1)
    assert asked(script) == [2]


# ---- where a wait does not pay ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "waits"),
    [
        pytest.param({"num_own": 64}, {"num_own": 64}, True, id="half is common"),
        pytest.param({"num_own": 10}, {"num_own": 65}, False, id="most of it is its own"),
        pytest.param({"num_own": 65}, {"num_own": 10}, False, id="the other computes more"),
        pytest.param({"num_common": 63}, {"num_common": 63}, False, id="little in common"),
        pytest.param({"max_tokens": 1}, {}, False, id="the other is not saved"),
        pytest.param({}, {"max_tokens": 1}, True, id="it is not saved itself"),
    ],
)
def test_a_wait_has_to_pay(first: dict[str, Any], second: dict[str, Any], waits: bool) -> None:
    script = script_of()
    usual: dict[str, Any] = {"num_common": TOKENS_PER_HASH}
    submit(script, 1, **usual | first)
    submit(script, 2, **usual | second)
    assert asked(script) == ([1] if waits else [1, 2])


def test_nothing_waits_where_the_pool_shares_nothing() -> None:
    script = script_of(enable_prefix_caching=False)
    submit(script, 1, 2, 3)
    assert asked(script) == [1, 2, 3]


def test_a_request_without_a_prefix_of_its_own_to_share_waits_for_nothing() -> None:
    script = script_of()
    submit(script, 1)
    params = SamplingParams(max_tokens=3, prompt_logprobs=1)
    script.say(GATEWAY, Submit(replace(request(2), tier="be", prompt=prompt(2), params=params)))
    assert asked(script) == [1, 2]


# ---- where the bringer does not come ---------------------------------------------------------------------------------


def abort(script: Script) -> None:
    script.say(GATEWAY, Abort([RequestKey(1)]))


def die(script: Script) -> None:
    script.close(PREFILL)


def refuse(script: Script) -> None:
    script.say(POOL, Reserved(RequestKey(1), None))
    # Room is there again.
    script.tick(0.25)


def fail(script: Script) -> None:
    reserved(script, 1, num_found=4)
    script.say(PREFILL, Failed(RequestKey(1), "load", "no such bytes"))
    script.tick(0.3)


def lose_the_pool(script: Script) -> None:
    script.close(POOL)
    script.connect(POOL, epoch=2, num_blocks=10_000, enable_prefix_caching=True, segment="another")


@pytest.mark.parametrize("happens", [abort, refuse, fail, lose_the_pool])
@pytest.mark.parametrize("has_room", [False, True])
def test_the_others_start_when_it_does_not_come(happens: Callable[[Script], None], has_room: bool) -> None:
    script = script_of("prefill-0", "prefill-1")
    submit(script, 1, 2, 3)
    assert asked(script) == [1]
    if has_room and happens in (abort, lose_the_pool):
        reserved(script, 1)
    happens(script)
    assert {2, 3} <= {*asked(script)}
    # The first one may wait for one of them now.
    assert waiting(script) <= 1


def test_another_one_brings_the_prefix_if_the_first_may_be_wrong() -> None:
    script = script_of()
    submit(script, 1, 2, 3)
    reserved(script, 1)
    assert asked(script) == [1]
    moved = [Moved("load", 0, 0.0, num_checked=1, num_changed=1)]
    script.say(PREFILL, prefill_report(moved=moved))
    assert (asked(script), waiting(script)) == ([2], 1)
    script.first_token(1)
    script.saved(1)
    assert (asked(script), waiting(script)) == ([], 1)


def test_the_others_start_when_its_instance_dies() -> None:
    script = script_of("prefill-0", "prefill-1")
    submit(script, 1, 2, 3)
    reserved(script, 1)
    script.take()
    script.close(str(script.state(1).instance_id))
    assert asked(script) == [2, 3]
    reserved(script, 2, 3)
    script.first_token(2, sender=str(script.state(2).instance_id))
    script.saved(2, sender=str(script.state(2).instance_id))
    assert asked(script) == [1]


def test_a_request_that_leaves_waits_no_more() -> None:
    script = script_of()
    submit(script, 1, 2, 3)
    script.say(GATEWAY, Abort([RequestKey(2)]))
    assert waiting(script) == 1
    reserved(script, 1)
    script.first_token(1)
    script.saved(1)
    assert asked(script) == [1, 3]


# ---- any order of events ---------------------------------------------------------------------------------------------


@dataclass
class Table:
    """Requests that wait, start, and end in any way, and the queue's rule that none starts while it has to wait."""

    prefixes: PrefixesInFlight = field(default_factory=PrefixesInFlight)
    queued: dict[RequestKey, RequestState] = field(default_factory=dict)
    held: dict[RequestKey, RequestState] = field(default_factory=dict)
    started: dict[RequestKey, RequestState] = field(default_factory=dict)
    num_waits: dict[RequestKey, int] = field(default_factory=dict)

    def come(self, branch: tuple[int, int], is_rt: bool) -> None:
        key = RequestKey(len(self.num_waits) + 1)
        tokens = [token for token in branch for _ in range(TOKENS_PER_HASH)] + [int(key)] * NUM_OWN
        self.num_waits[key] = 0
        self.queued[key] = RequestState(
            replace(request(key), prompt=tokens),
            GATEWAY,
            Phase.QUEUED,
            0.0,
            deadlines=Deadlines(is_rt, 9.0, 0.1),
        )

    def start(self) -> None:
        """Starts the first that need not wait."""
        for key, state in list(self.queued.items()):
            del self.queued[key]
            if not self.prefixes.lets_wait(state):
                self.prefixes.add(state)
                self.started[key] = state
                return
            assert not state.is_rt
            self.num_waits[key] += 1
            self.held[key] = state

    def find(self, place: int, num_hashes: int) -> None:
        if self.started:
            state = self.started[[*self.started][place % len(self.started)]]
            state.num_found = state.num_cached = num_hashes * TOKENS_PER_HASH
            self._release(self.prefixes.found(state))

    def end(self, place: int, starts_again: bool) -> None:
        if self.started:
            state = self.started.pop([*self.started][place % len(self.started)])
            self._release(self.prefixes.discard(state))
            self._release(self.prefixes.discard(state))
            state.num_found = state.num_cached = 0
            if starts_again:
                self.queued[state.key] = state

    def leave(self, place: int) -> None:
        if self.held:
            key = [*self.held][place % len(self.held)]
            del self.held[key]
            self.prefixes.forget(key)

    def _release(self, states: list[RequestState]) -> None:
        for state in states:
            self.queued[state.key] = self.held.pop(state.key)

    def check(self) -> None:
        self.prefixes.check(self.held)
        assert self.held.keys() <= self.num_waits.keys()
        if not self.started:
            assert not self.held


STEPS = st.one_of(
    st.tuples(st.just("come"), st.tuples(st.integers(1, 2), st.integers(1, 2)), st.booleans()),
    st.tuples(st.just("start")),
    st.tuples(st.just("find"), st.integers(0, 5), st.integers(1, 2)),
    st.tuples(st.just("end"), st.integers(0, 5), st.booleans()),
    st.tuples(st.just("leave"), st.integers(0, 5)),
)


@given(st.lists(STEPS, max_size=60))
@settings(deadline=None)
def test_every_request_starts_whatever_happens_to_others(steps: list[tuple[Any, ...]]) -> None:
    table = Table()
    for name, *arguments in steps:
        getattr(table, name)(*arguments)
        table.check()
    # A wait ends when a request ends, and a request waits at most once for each part of its prompt.
    for _ in range(2 * len(table.num_waits) + len(table.queued)):
        table.start()
        if not table.queued:
            table.end(0, starts_again=False)
        table.check()
    assert not (table.queued or table.held or table.started)
    assert len(table.prefixes) == table.prefixes.num_waiting == 0
