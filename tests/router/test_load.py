"""An event takes the router the same time however long the queue is, and the reported queue follows its changes."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from msgspec.structs import replace

from alignedserve.protocol.messages import Abort, Hello, Reserve, Submit
from alignedserve.router.dispatch import MAX_STARTS
from alignedserve.router.events import Event, Send
from alignedserve.router.requests import Phase
from alignedserve.router.router import Router
from alignedserve.router.status import describe
from alignedserve.sim.island import SimIsland
from alignedserve.types import Epoch, InstanceId, RequestKey
from tests.calls import num_calls
from tests.router.script import GATEWAY, PREFILL, Script, hello, request
from tests.sim.islands import limits, requests, small_island

MANY = 1000


def submit(script: Script, key: int, tier: str = "be", num_prompt: int = 6, owner: str = "") -> None:
    script.say(GATEWAY, Submit(replace(request(key, num_prompt), tier=tier, owner=owner)))


def with_requests(count: int, window: int, owners: Sequence[str]) -> Script:
    """Eight at least are started, in a window of so many iterations."""
    script = Script(num_blocks=10**6, max_num_queued_reqs=4 * MANY, prefill_window=window)
    for key in range(1, count + 9):
        submit(script, key, owner=owners[key % len(owners)])
    script.take()
    return script


def ask(script: Script) -> object:
    me = hello("router")
    return describe(script.router, me, [hello(PREFILL)], {}, None, 1)


EVENTS: dict[str, Callable[[Script], object]] = {
    "best effort comes": lambda script: submit(script, 10**6),
    "real time comes": lambda script: submit(script, 10**6, "rt"),
    "one of the queue leaves": lambda script: script.say(GATEWAY, Abort([RequestKey(20)])),
    "one that was started leaves": lambda script: script.say(GATEWAY, Abort([RequestKey(1)])),
    "the pool answers": lambda script: script.reserve(1),
    "time passes": lambda script: script.tick(0.1),
    "somebody asks how it is": ask,
}


# iterations: almost all are queued; or all are started
@pytest.fixture(scope="module", params=[(2, [""]), (MANY, [""]), (2, ["a", "b"]), (MANY, ["a", "b"])])
def scripts(request: pytest.FixtureRequest) -> tuple[Script, Script]:
    """With few requests, and with many; used by one event after the other."""
    return with_requests(30, *request.param), with_requests(MANY, *request.param)


@pytest.mark.parametrize("name", EVENTS)
def test_an_event_takes_as_much_work_however_many_there_are(
    name: str, scripts: tuple[Script, Script]
) -> None:
    few, many = (num_calls(functools.partial(EVENTS[name], script)) for script in scripts)
    # a heap is a few steps deeper
    assert many <= 1.2 * few + 20


def in_pool(count: int, policy: str) -> Script:
    """Real time of two owners waits for slots, which all are one owner's."""
    script = Script(num_blocks=10**6, max_num_queued_reqs=4 * MANY, prefill_window=MANY, policy=policy)
    for key in range(1, count + 9):
        submit(script, key, "rt", owner="a" if key <= 8 or key % 2 else "b")
        script.reserve(key, [10 * key, 10 * key + 1])
        script.first_token(key)
        script.saved(key)
        if key <= 8:
            script.decode(admitted=[RequestKey(key)])
    script.take()
    return script


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_room_for_owners_takes_as_much_work_however_many_wait_in_the_pool(policy: str) -> None:
    few, many = in_pool(40, policy), in_pool(MANY, policy)
    for event in (lambda script: script.token(1), *(lambda script: script.tick(0.1),) * 6):
        num_few, num_many = (num_calls(functools.partial(event, script)) for script in (few, many))
        assert num_many <= 1.2 * num_few + 20
    phases = Counter(state.phase for state in many.router.state.requests)
    assert phases[Phase.MAKING_ROOM] == 4 and phases[Phase.POOLED] > MANY / 2, phases


def test_prompts_of_a_token_are_not_all_started_at_once() -> None:
    """Instances run eight at a time here, in a window of two iterations of 32 tokens."""
    script = Script()
    for key in range(1, 41):
        submit(script, key, num_prompt=1)
    assert sum(isinstance(message, Reserve) for _, message in script.take()) == 16


def test_an_event_starts_only_so_many_and_the_next_one_goes_on() -> None:
    script = Script(connect=False, prefill_window=MANY)
    for name in ("kvpool", GATEWAY):
        script.connect(name, num_blocks=10_000)
    for key in range(1, 3 * MAX_STARTS):
        submit(script, key)
    script.take()
    script.connect(PREFILL)
    started = [message.key for _, message in script.take() if isinstance(message, Reserve)]
    assert len(started) == MAX_STARTS
    script.reserve(started[0])
    assert sum(isinstance(message, Reserve) for _, message in script.take()) == MAX_STARTS


# ---- counts ----


def counted(
    router: Router, names: list[InstanceId]
) -> tuple[dict[str, int], dict[str, Counter[str]], dict[InstanceId, Counter[str]]]:
    """Plainly: all of them are looked at."""
    states = [state for state in router.state.requests if not state.is_finished]
    tiers: dict[str, Counter[str]] = {}
    for state in states:
        tiers.setdefault(state.request.tier, Counter())[state.phase.value] += 1
    places = {
        name: Counter(
            each.phase.value
            for each in states
            if name == each.instance_id or (each.staged and name == each.staged.at)
        )
        for name in names
    }
    return dict(Counter(state.phase.value for state in states)), tiers, places


@pytest.mark.parametrize("link", ["host", "gloo"])
def test_counts_are_those_of_all_requests_after_each_event(link: str) -> None:
    """Of an island that is short of memory, whose processes die."""
    island: SimIsland = small_island(
        link=link, decode=limits(num_blocks=34), pool_blocks=60, num_prefill=2, num_decode=2
    )
    seen = Counter[str]()
    me = Hello("router", InstanceId("router"), Epoch(1), 1, {}, limits())

    def compare(now: float, event: Event, sends: list[Send]) -> None:
        core = island.router.core
        assert core
        for state in core.state.requests:
            state.check()
        cluster = [process.hello for process in core.state.cluster]
        found = describe(core, me, cluster, {}, None, 1)
        places = {
            process.instance_id: process.requests
            for process in found.processes
            if process.instance_id != "router"
        }
        assert (found.requests, found.tiers, places) == counted(core, [*places])
        seen.update(found.requests)

    island.router.observers.append(compare)
    island.submit([replace(each, tier="be" if each.key % 2 else "rt") for each in requests(40, every_s=0.01)])
    island.start()
    for at_s, process in ((0.5, island.prefills[0]), (1.0, island.decodes[0]), (1.5, island.pool)):
        island.run(at_s)
        process.kill()
        process.start()
    assert island.run_until_done(40, 300.0)
    phases = {"queued", "reserving", "prefilling", "pooled", "offered", "running"}
    assert seen.keys() >= phases | ({"staged"} if link == "gloo" else set())
