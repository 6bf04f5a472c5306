"""How much an island has to do, by what its router says of it."""

from __future__ import annotations

from pytest import approx

from alignedserve.protocol.messages import Gone
from alignedserve.router.load import BUSY_S, LoadMeter
from tests.router.script import DECODE, ONE, PREFILL, Script, prefill_report


def test_an_island_without_instances_has_nothing_to_do() -> None:
    load = LoadMeter(Script().router).read(0.0)
    assert (load.num_requests, load.busy) == (0, 0.0)


def test_the_role_that_computes_most_says_how_busy_it_is() -> None:
    script = Script()
    script.running()
    meter = LoadMeter(script.router)
    assert meter.read(0.0).num_requests == 1
    # Before it looked, nobody knows when that was.
    assert meter.read(0.0).busy == 0.0
    script.decode(num_computed=1, duration_s=1.5)
    script.say(PREFILL, prefill_report(num_computed=1, duration_s=1.0))
    assert meter.read(2.0).busy == approx(0.75)
    assert meter.read(BUSY_S).busy == approx(1.5 / BUSY_S)
    assert meter.read(2.0 + BUSY_S).busy == 0.0


def test_nobody_is_busier_than_all_the_time() -> None:
    script = Script()
    script.running()
    meter = LoadMeter(script.router)
    meter.read(0.0)
    script.decode(num_computed=1, duration_s=3.0)
    assert meter.read(1.0).busy == 1.0


def test_what_has_ended_is_no_request_any_more() -> None:
    script = Script()
    script.running()
    script.token(finish_reason="stop")
    script.say(DECODE, Gone([ONE]))
    assert LoadMeter(script.router).read(0.0).num_requests == 0
