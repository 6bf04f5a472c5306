"""A client goes away while its request is in a certain state, as the system itself reports it: nothing is left of it,
in no process, long before its answer would have ended."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import FAMILY, Borrow, Directory
from tests.cluster.house import PATIENCE_S, opened
from tests.cluster.processes import DECODES, PREFILLS, Processes, Setup
from tests.playing import play

WAYS: dict[str, tuple[dict[str, Any], int]] = {
    "stream": ({"is_stream": True}, 1),
    "whole": ({"is_stream": False}, 1),
    "stream of two": ({"is_stream": True, "n": 2}, 2),
    "best of two": ({"is_stream": False, "best_of": 2}, 2),
}


def ways(always: str) -> pytest.MarkDecorator:
    """This one in every run, and a share of the others, which differ in what the gateway makes of them."""
    drawn = (pytest.mark.slow, pytest.mark.drawn(one_in=3))
    return pytest.mark.parametrize(
        ("way", "num"),
        [pytest.param(*each, id=name, marks=() if name == always else drawn) for name, each in WAYS.items()],
    )


def house_of(borrow: Borrow, link: str, **options: Any) -> Processes:
    # While it stands still a process is not to be taken for dead, however long the others take to start.
    silence_s = 2 * PATIENCE_S
    return borrow(is_slow=True, is_slowest=True, has_gateway=True, link=link, silence_s=silence_s, **options)


@pytest.fixture
def gloo(borrow: Borrow) -> Processes:
    return house_of(borrow, "gloo")


@ways(always="stream")
def test_in_the_pool(gloo: Processes, way: dict[str, Any], num: int) -> None:
    async def scenario() -> None:
        async with opened(gloo, PREFILLS[0]) as house:
            asking = house.ask(**way)
            await house.until({"pooled": num})
            await house.check_gone(asking)

    play(scenario)


FOUR = [
    pytest.param({"is_stream": True, "n": 4}, id="stream of four"),
    pytest.param({"is_stream": False, "best_of": 4}, id="best of four", marks=pytest.mark.drawn(one_in=2)),
]


@pytest.mark.slow
@pytest.mark.parametrize("way", FOUR)
def test_where_the_pool_is_full(borrow: Borrow, way: dict[str, Any]) -> None:
    # The fourth would find the others' prompt in the pool, and have room, if it came after that was saved.
    processes = house_of(borrow, "gloo", enable_prefix_caching=False)

    async def scenario() -> None:
        async with opened(processes, PREFILLS[0]) as house:
            asking = house.ask(**way)
            await house.until({"pooled": 3, "queued": 1})
            await house.check_gone(asking)

    play(scenario)


@ways(always="whole")
def test_in_prefill(gloo: Processes, way: dict[str, Any], num: int) -> None:
    async def scenario() -> None:
        async with opened(gloo, PREFILLS[0]) as house:
            asking = house.ask(**way)
            await house.until({"prefilling": num})
            await house.check_gone(asking)

    play(scenario)


@pytest.mark.slow
@ways(always="best of two")
def test_on_the_way_into_a_prefill_instances_buffer(gloo: Processes, way: dict[str, Any], num: int) -> None:
    async def scenario() -> None:
        async with opened(gloo, PREFILLS[0]) as house:
            # The buffer has room for two of these.
            asking = house.ask(**way, num_prompt=150)
            await house.until({"pooled": num})
            # Its copy would be over before anyone could look.
            house.processes.signal(PREFILLS[0], signal.SIGSTOP)
            house.processes.start(DECODES[0])
            await house.until({"staged": num})
            house.processes.signal(PREFILLS[0], signal.SIGCONT)
            await house.check_gone(asking)

    play(scenario)


TWO = [
    pytest.param("gloo", {"is_stream": True, "n": 2}, id="gloo-stream of two"),
    pytest.param(
        "gloo", {"is_stream": False, "best_of": 2}, id="gloo-best of two", marks=pytest.mark.drawn(one_in=3)
    ),
    pytest.param(
        "host", {"is_stream": True, "n": 2}, id="host-stream of two", marks=pytest.mark.drawn(one_in=3)
    ),
    pytest.param(
        "host", {"is_stream": False, "best_of": 2}, id="host-best of two", marks=pytest.mark.drawn(one_in=3)
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("link", "way"), TWO)
def test_staged_for_a_decode_instance_that_is_full(borrow: Borrow, link: str, way: dict[str, Any]) -> None:
    """There is room for one of two: one runs, the other is a candidate."""
    processes = house_of(borrow, link)

    async def scenario() -> None:
        async with opened(processes, PREFILLS[0], DECODES[0]) as house:
            asking = house.ask(**way)
            await house.until({"running": 1, "offered": 1})
            await house.check_gone(asking)

    play(scenario)


@ways(always="stream of two")
def test_in_the_queue(gloo: Processes, way: dict[str, Any], num: int) -> None:
    async def scenario() -> None:
        async with opened(gloo, DECODES[0]) as house:
            asking = house.ask(**way)
            await house.until({"queued": num})
            await house.check_gone(asking)

    play(scenario)


def running_in(borrow: Borrow, link: str, way: dict[str, Any], num: int) -> None:
    processes = house_of(borrow, link)

    async def scenario() -> None:
        async with opened(processes, PREFILLS[0], *DECODES) as house:
            asking = house.ask(**way)
            await house.until({"running": num})
            await house.check_gone(asking)

    play(scenario)


@ways(always="stream")
def test_running(borrow: Borrow, way: dict[str, Any], num: int) -> None:
    running_in(borrow, "gloo", way, num)


@pytest.mark.slow
@ways(always="stream of two")
def test_running_without_a_link(borrow: Borrow, way: dict[str, Any], num: int) -> None:
    running_in(borrow, "host", way, num)


# State, instances, and the stages of which a trace has spans.
STORIES = {
    "queued": ((), ["queue"]),
    "prefilling": (PREFILLS[:1], ["queue", "prefill"]),
    "pooled": (PREFILLS[:1], ["queue", "prefill", "pool"]),
    "running": ((PREFILLS[0], DECODES[0]), ["queue", "prefill", "pool", "admit", "decode"]),
}


@pytest.mark.slow
def test_its_trace_ends_with_the_stage_that_it_was_left_in(tiny_model: Directory, tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from tests.gateway.telemetry.test_traces import receiving

    async def scenario() -> None:
        for state, (instances, _) in STORIES.items():
            async with opened(processes, *instances) as house:
                asking = house.ask(is_stream=True)
                await house.until({state: 1})
                await house.check_gone(asking)

    with receiving() as (endpoint, spans):
        model = tiny_model(FAMILY)
        setup = Setup(model, is_slow=True, is_slowest=True, has_gateway=True, otlp_endpoint=endpoint)
        processes = Processes(setup, tmp_path)
        try:
            play(scenario)
            processes.end()
        finally:
            processes.clean_up()
    wholes = sorted(
        (span for span in spans if span.name == "request"), key=lambda span: span.start_time_unix_nano
    )
    for whole, (_, stages) in zip(wholes, STORIES.values(), strict=True):
        parts = sorted(
            (span for span in spans if span.parent_span_id == whole.span_id),
            key=lambda span: span.start_time_unix_nano,
        )
        assert [span.name for span in parts] == stages
        assert parts[-1].end_time_unix_nano == whole.end_time_unix_nano
