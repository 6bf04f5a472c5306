"""An island's load, as derived from its router's reports."""

from __future__ import annotations

from pytest import approx

from alignedserve.protocol.messages import Gone
from alignedserve.router.status import BUSY_S, LoadMeter
from tests.router.script import BLOCK_SIZE, DECODE, ONE, PREFILL, Script, prefill_report


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


def test_what_waits_counts_by_class_until_it_is_computed() -> None:
    script = Script()
    meter = LoadMeter(script.router)
    before = meter.read(0.0)
    assert (before.num_prefills, before.num_decodes, before.is_full) == (1, 1, False)
    script.submit(1)
    script.submit(2, "be")
    load = meter.read(1.0)
    assert (load.num_rt_tokens, load.num_tokens) == (6, 12)
    script.reserve(1)
    script.first_token(1)
    script.saved(1)
    load = meter.read(2.0)
    assert (load.num_requests, load.num_rt_tokens, load.num_tokens) == (2, 0, 6)


def test_a_full_decode_instance_says_so() -> None:
    script = Script()
    for key in range(1, 9):
        assert not LoadMeter(script.router).read(0.0).is_full
        script.running(key)
    assert LoadMeter(script.router).read(0.0).is_full


def test_what_caches_hold_is_said_where_there_are_some() -> None:
    script = Script(connect=False)
    assert LoadMeter(script.router).read(0.0).is_full, "nobody decodes"
    script.connect(PREFILL, num_blocks=10)
    script.connect("prefill-1", num_blocks=10, enable_prefix_caching=True)
    load = LoadMeter(script.router).read(0.0)
    assert (load.num_prefills, load.num_cache_tokens) == (2, 10 * BLOCK_SIZE)
