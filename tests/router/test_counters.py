"""The router's counters, as it reports them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from alignedserve.protocol.messages import (
    SCHEDULING_S,
    Cluster,
    InstanceStats,
    Moved,
    Offer,
    Submit,
    Tokens,
)
from alignedserve.router.status import describe
from alignedserve.types import InstanceId, RequestKey
from tests.router.script import (
    DECODE,
    GATEWAY,
    ONE,
    POOL,
    PREFILL,
    Script,
    decode_report,
    hello,
    prefill_report,
    request,
)


def asked(script: Script) -> Cluster:
    connected = [process.hello for process in script.router.state.cluster]
    expected = {PREFILL: "prefill", DECODE: "decode", POOL: "kvpool"}
    return describe(script.router, hello("router"), connected, expected, None, ticket=1)


def stats(script: Script, name: InstanceId = DECODE) -> InstanceStats:
    return next(process.stats for process in asked(script).processes if process.instance_id == name)


def test_an_eviction_is_a_preemption_that_kept_the_kv() -> None:
    script = Script()
    script.running()
    script.decode(wants_evicted=[ONE])
    script.reserve(blocks=[10, 11, 12, 13])
    assert (stats(script).num_preemptions, stats(script).num_evictions) == (1, 0)
    script.decode(evicted=[(ONE, 6)])
    assert (stats(script).num_preemptions, stats(script).num_evictions) == (1, 1)


def test_a_drop_is_a_preemption_that_kept_nothing() -> None:
    script = Script()
    script.running()
    script.decode(dropped=[ONE])
    assert (stats(script).num_preemptions, stats(script).num_evictions) == (1, 0)
    assert asked(script).sharing["recomputed"] == 1


def test_a_batch_is_switched_to_once() -> None:
    script = Script()
    script.pooled(1)
    script.pooled(2)
    script.chosen(1, 2)
    assert stats(script).num_batch_switches == 0
    script.decode(admitted=[ONE])
    script.decode(admitted=[RequestKey(2)])
    assert stats(script).num_batch_switches == 1
    script.pooled(3)
    script.chosen(3, is_batch=False)
    script.decode(admitted=[RequestKey(3)])
    assert stats(script).num_batch_switches == 1, "it came beside the running batch"
    script.pooled(4)
    script.chosen(4)
    script.decode(admitted=[RequestKey(4)])
    assert stats(script).num_batch_switches == 2


def test_a_staged_batch_that_arrives_in_parts_is_one() -> None:
    script = Script(link="gloo")
    script.pooled(1)
    script.pooled(2)
    script.chosen(1, 2)
    for key in map(RequestKey, (1, 2)):
        script.say(PREFILL, prefill_report(staged=[key]))
        script.decode(admitted=[key])
    assert stats(script).num_batch_switches == 1


def test_parts_of_a_batch_have_its_number_and_the_next_batch_another() -> None:
    script = Script(link="gloo")
    for key in (1, 2, 3):
        script.pooled(key)
    script.chosen(1, 2)
    script.take()
    for key in map(RequestKey, (1, 2)):
        script.say(PREFILL, prefill_report(staged=[key]))
        assert script.take_one(Offer, DECODE).batch == 1
        script.decode(admitted=[key])
    script.chosen(3)
    script.take()
    script.say(PREFILL, prefill_report(staged=[RequestKey(3)]))
    assert script.take_one(Offer, DECODE).batch == 2


def test_iterations_that_mix_batches_and_what_scheduling_took_are_counted() -> None:
    script = Script()
    script.running()
    script.decode(num_computed=1, is_mixed=True, scheduling_s=0.003)
    script.decode(num_computed=1, scheduling_s=0.0001)
    script.decode(num_computed=1, batch=0, scheduling_s=7.0)
    script.decode(is_mixed=True)
    found = stats(script)
    assert (found.num_batch_iterations, found.num_mixed_iterations) == (2, 1)
    counted = dict(zip([*SCHEDULING_S, "more"], found.scheduling, strict=True))
    assert {end_s: count for end_s, count in counted.items() if count} == {0.0001: 1, 0.005: 1, "more": 1}
    assert found.scheduling_s == pytest.approx(7.0031)


def test_a_staged_copy_that_is_given_up_is_a_spill() -> None:
    script = Script(link="gloo")
    script.pooled()
    script.chosen(1)
    assert stats(script, PREFILL).num_spills == 0
    script.close(DECODE)
    script.say(PREFILL, prefill_report(staged=[ONE]))
    assert stats(script, PREFILL).num_spills == 1


def test_recoveries_are_counted_by_who_was_lost() -> None:
    script = Script()
    script.running(1)
    script.submit(2)
    script.reserve(2)
    assert asked(script).recoveries == {}
    script.close(DECODE)
    script.close(PREFILL)
    assert asked(script).recoveries == {"decode": 1, "prefill": 1}


def test_counts_stay_while_an_instance_is_away() -> None:
    script = Script()
    script.running()
    script.decode(moved=[Moved("load", 100, 0.5)])
    script.decode(wants_evicted=[ONE], moved=[Moved("load", 20, 0.25), Moved("save", 7, 1.0)])
    expected = [Moved("load", 120, 0.75), Moved("save", 7, 1.0)]
    sent = stats(script)
    assert sent.moved == expected
    script.close(DECODE)
    assert (stats(script).moved, stats(script).num_preemptions) == (expected, 1)
    script.connect(DECODE, epoch=2)
    script.decode(moved=[Moved("load", 1, 1.0)])
    script.decode(scheduling_s=0.003)
    assert stats(script).moved[0] == Moved("load", 121, 1.75)
    assert (sent.moved, sum(sent.scheduling)) == (expected, 0), "what was sent does not count on"


def test_the_time_of_iterations_counts_where_they_computed_something() -> None:
    script = Script()
    script.running()
    script.decode(num_computed=3, duration_s=0.5)
    script.decode(duration_s=0.25)
    script.decode(num_computed=4, duration_s=1.0)
    script.say(PREFILL, prefill_report(num_computed=10, duration_s=2.0))
    assert (stats(script).num_computed_tokens, stats(script).computing_s) == (7, 1.5)
    assert (stats(script, PREFILL).num_computed_tokens, stats(script, PREFILL).computing_s) == (10, 2.0)


def test_the_running_batch_has_a_spread() -> None:
    script = Script()
    script.say(DECODE, decode_report(min_length=10, max_length=25))
    assert (stats(script).min_length, stats(script).max_length) == (10, 25)


def test_requests_are_counted_by_tier() -> None:
    script = Script()
    script.running()
    assert asked(script).tiers == {"rt": {"running": 1}}


def test_the_first_token_and_the_last_bring_the_timeline() -> None:
    script = Script()
    script.submit()
    script.tick(1.0)
    script.reserve()
    script.tick(0.5)
    script.first_token()
    assert script.take_one(Tokens, GATEWAY).timelines[ONE] == [
        ("queued", 0.0),
        ("reserving", 0.0),
        ("prefilling", 1.0),
    ]
    script.saved()
    script.chosen(1)
    script.tick(0.25)
    script.decode(admitted=[ONE])
    script.token()
    assert script.take_one(Tokens, GATEWAY).timelines == {}
    script.token(finish_reason="stop")
    assert script.take_one(Tokens, GATEWAY).timelines[ONE] == [
        ("queued", 0.0),
        ("reserving", 0.0),
        ("prefilling", 1.0),
        ("pooled", 1.5),
        ("offered", 1.5),
        ("running", 1.75),
    ]


def test_how_classes_share_is_counted() -> None:
    script = Script()
    script.say(GATEWAY, Submit(replace(request(1), tier="be")))
    script.reserve(1)
    script.first_token(1)
    script.saved(1)
    script.chosen(1)
    script.decode(admitted=[ONE], num_be_blocks=3, num_be_running=1)
    assert asked(script).sharing == {"demoted": 0, "express": 0, "evicted_for_rt": 0, "recomputed": 0}
    script.pooled(2)
    script.decode(wants_evicted=[ONE], num_be_blocks=3, num_be_running=1)
    script.reserve(1, blocks=[10, 11, 12, 13])
    script.decode(evicted=[(ONE, 6)])
    assert asked(script).sharing == {"demoted": 0, "express": 1, "evicted_for_rt": 1, "recomputed": 0}
