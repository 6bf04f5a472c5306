"""The router and adapters that are loaded while it runs, in virtual time."""

from __future__ import annotations

from msgspec.structs import replace

from alignedserve.protocol.messages import (
    AdapterAt,
    AdaptersSet,
    ForgetAll,
    Prefill,
    Rejected,
    ResetPrefixCache,
    SetAdapters,
    Submit,
    UsePool,
    Welcome,
)
from alignedserve.types import RequestKey
from tests.router.script import DECODE, GATEWAY, POOL, PREFILL, Script, hello, request

LAUNCHER = "launcher-0"
SQL, LEGAL = AdapterAt("sql\n1", "/a/1"), AdapterAt("legal\n2", "/a/2")


def script_of(num_places: int = 3) -> Script:
    script = Script(connect=False)
    script.connect(LAUNCHER)
    script.connect(POOL)
    script.say(LAUNCHER, SetAdapters(1, []))
    for name in (PREFILL, DECODE):
        script.connect(name, num_adapter_places=num_places)
    script.connect(GATEWAY)
    obeyed(script, 1)
    script.take()
    return script


def order(script: Script, number: int, *adapters: AdapterAt) -> None:
    script.say(LAUNCHER, SetAdapters(number, list(adapters)))


def obeyed(script: Script, number: int) -> None:
    for name in (PREFILL, DECODE):
        script.say(name, AdaptersSet(number))


def ordered(script: Script) -> dict[str, SetAdapters]:
    return {name: each for name, each in script.take() if isinstance(each, SetAdapters)}


def test_the_launcher_is_answered_when_all_instances_have_the_adapter() -> None:
    script = script_of()
    order(script, 2, SQL)
    told = ordered(script)
    assert {name: each.adapters for name, each in told.items()} == {PREFILL: [SQL], DECODE: [SQL]}
    number = told[PREFILL].number
    script.say(PREFILL, AdaptersSet(number))
    assert not script.take()
    script.say(DECODE, AdaptersSet(number - 1))  # of an earlier order
    assert not script.take()
    script.say(DECODE, AdaptersSet(number))
    assert script.take() == [(LAUNCHER, AdaptersSet(2))]


def test_the_launcher_gets_the_reason_of_the_instance_that_could_not_load_it() -> None:
    script = script_of()
    order(script, 2, SQL)
    number = ordered(script)[PREFILL].number
    script.say(PREFILL, AdaptersSet(number, "its rank is 17"))
    script.say(DECODE, AdaptersSet(number))
    assert script.take() == [(LAUNCHER, AdaptersSet(2, "its rank is 17"))]
    order(script, 3)
    assert {name: each.adapters for name, each in ordered(script).items()} == {PREFILL: [], DECODE: []}


def test_an_instance_that_dies_is_not_waited_for_and_gets_the_adapters_first_when_it_is_back() -> None:
    script = script_of()
    order(script, 2, SQL)
    number = ordered(script)[PREFILL].number
    script.say(PREFILL, AdaptersSet(number))
    script.close(DECODE)
    assert (LAUNCHER, AdaptersSet(2)) in script.take()
    script.connect(DECODE, num_adapter_places=3, epoch=2)
    kinds = [type(each) for name, each in script.take() if name == DECODE]
    assert kinds[:3] == [Welcome, SetAdapters, UsePool]
    # An order that follows waits for it too.
    order(script, 3, SQL, LEGAL)
    number = ordered(script)[DECODE].number
    script.say(PREFILL, AdaptersSet(number))
    assert not script.take()
    script.say(DECODE, AdaptersSet(number))
    assert script.take() == [(LAUNCHER, AdaptersSet(3))]


def test_an_instance_that_connects_meanwhile_must_have_only_what_all_others_have() -> None:
    """It ends if it can't load the first ones. Others may refuse the next one."""
    script = script_of()
    order(script, 2, SQL)
    obeyed(script, ordered(script)[PREFILL].number)
    order(script, 3, SQL, LEGAL)
    number = ordered(script)[PREFILL].number
    script.close(DECODE)
    script.take()
    script.connect(DECODE, num_adapter_places=3, epoch=2)
    first, second = (each for _, each in script.take() if isinstance(each, SetAdapters))
    assert first.adapters == [SQL] and (second.number, second.adapters) == (number, [SQL, LEGAL])
    script.say(PREFILL, AdaptersSet(number))
    script.say(DECODE, AdaptersSet(first.number))
    assert not script.take()
    script.say(DECODE, AdaptersSet(number, "its rank is 17"))
    assert script.take() == [(LAUNCHER, AdaptersSet(3, "its rank is 17"))]
    # The launcher has not taken it back yet.
    script.close(DECODE)
    script.take()
    script.connect(DECODE, num_adapter_places=3, epoch=3)
    assert [each.adapters for _, each in script.take() if isinstance(each, SetAdapters)] == [
        [SQL],
        [SQL, LEGAL],
    ]


def test_a_request_with_an_adapter_that_is_not_loaded_yet_is_refused() -> None:
    script = script_of()
    order(script, 2, SQL)
    number = ordered(script)[PREFILL].number
    asked = Submit(replace(request(), adapter=SQL.adapter), [])
    script.say(GATEWAY, asked)
    assert script.take_one(Rejected, GATEWAY).reason == "adapter"
    obeyed(script, number)
    script.take()
    script.say(GATEWAY, asked)
    assert not [each for _, each in script.take() if isinstance(each, Rejected)]


def test_no_adapter_counts_as_loaded_while_no_instance_is_up() -> None:
    script = script_of()
    script.close(PREFILL)
    script.close(DECODE)
    script.take()
    order(script, 2, SQL)
    assert script.take() == [(LAUNCHER, AdaptersSet(2, "no instance is up"))]
    # Both die before they answer.
    script = script_of()
    order(script, 2, SQL)
    script.close(PREFILL)
    script.close(DECODE)
    assert (LAUNCHER, AdaptersSet(2, "no instance is up")) in script.take()


def test_an_unloaded_adapter_stays_until_its_last_request_has_ended() -> None:
    script = script_of()
    order(script, 2, SQL, LEGAL)
    number = ordered(script)[PREFILL].number
    obeyed(script, number)
    asked = replace(request(), adapter=SQL.adapter)
    script.say(GATEWAY, Submit(asked, []))
    script.take()
    order(script, 3)
    told = ordered(script)
    assert [each.adapters for each in told.values()] == [[SQL], [SQL]]
    obeyed(script, told[PREFILL].number)
    assert (LAUNCHER, AdaptersSet(3, kept=[SQL.adapter])) in script.take()
    script.tick(1.0)
    assert not ordered(script) and not script.router.is_idle
    # Instances that connect need it as well.
    script.close(DECODE)
    script.connect(DECODE, num_adapter_places=3, epoch=2)
    assert ordered(script)[DECODE].adapters == [SQL]
    script.close(GATEWAY)
    script.take()
    script.tick(1.0)
    told = ordered(script)
    assert [each.adapters for each in told.values()] == [[], []]
    obeyed(script, told[PREFILL].number)
    assert script.take() == [(LAUNCHER, AdaptersSet(3))]
    assert script.router.is_idle


def test_adapters_that_requests_still_use_take_places() -> None:
    script = script_of(num_places=1)
    order(script, 2, SQL)
    number = ordered(script)[PREFILL].number
    obeyed(script, number)
    script.say(GATEWAY, Submit(replace(request(), adapter=SQL.adapter), []))
    script.take()
    order(script, 3, LEGAL)
    reason = "2 adapters would be in use, those included that running requests still use"
    assert script.take() == [(LAUNCHER, AdaptersSet(3, reason))]
    order(script, 4, SQL)
    assert all(each.adapters == [SQL] for each in ordered(script).values())


def test_a_new_router_takes_no_instance_before_it_knows_the_adapters() -> None:
    script = Script(connect=False)
    instance = hello(DECODE, num_adapter_places=3)
    assert script.router.puts_off(instance) and not script.router.puts_off(hello(DECODE))
    script.connect(LAUNCHER)
    order(script, 5, SQL)
    assert not script.router.puts_off(instance)
    script.take()
    script.connect(DECODE, num_adapter_places=3)
    assert ordered(script)[DECODE].adapters == [SQL]


def test_a_reset_of_the_prefix_cache_reaches_every_process_before_its_answer() -> None:
    script = Script()
    script.say(GATEWAY, Submit(request(), []))
    script.take()
    script.say(GATEWAY, ResetPrefixCache(9))
    told = script.take()
    assert told == [
        *((name, ForgetAll(1)) for name in (POOL, PREFILL, DECODE)),
        (GATEWAY, ResetPrefixCache(9)),
    ]
    assert script.router.state.counters.num_cache_resets == 1
    assert RequestKey(1) in {state.key for state in script.router.state.requests}
    assert not [each for _, each in told if isinstance(each, Prefill)]


def test_a_request_whose_adapter_was_unloaded_reaches_no_instance() -> None:
    """An instance that adopted it would end."""
    asked = replace(request(), adapter=SQL.adapter)
    script = script_of()
    script.say(GATEWAY, Submit(asked, []))
    assert script.take_one(Rejected, GATEWAY).reason == "adapter"
    # A new router gets it from the gateway, with its tokens, before it knows the adapters.
    script = Script(connect=False)
    for name in (POOL, GATEWAY):
        script.connect(name)
    script.say(GATEWAY, Submit(asked, [1, 2]))
    script.say(GATEWAY, Submit(replace(request(key=2), adapter=LEGAL.adapter), []))
    script.connect(LAUNCHER)
    script.take()
    order(script, 3, LEGAL)
    rejected = script.take_one(Rejected, GATEWAY)
    assert (rejected.key, rejected.reason, rejected.wait_s(2)) == (RequestKey(1), "adapter", None)
    assert [state.key for state in script.router.state.requests] == [RequestKey(2)]
