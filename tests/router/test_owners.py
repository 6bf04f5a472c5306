"""Turns of owners, their parts of the queue, and aborts of many requests at once."""

from __future__ import annotations

from msgspec.structs import replace

from alignedserve.protocol.messages import Abort, Offer, Rejected, Reserve, Submit
from alignedserve.router.owners import OwnerOrder, OwnerTurns
from alignedserve.router.requests import Phase
from alignedserve.types import RequestKey
from tests.router.script import GATEWAY, Script, request


def submit(script: Script, key: int, owner: str, tier: str = "rt", num_prompt: int = 6) -> None:
    script.say(GATEWAY, Submit(replace(request(key, num_prompt), owner=owner, tier=tier)))


def reserved(script: Script) -> list[int]:
    return [message.key for _, message in script.take() if isinstance(message, Reserve)]


# ---- turns ----


def test_the_least_served_owner_goes_first_and_absence_earns_nothing() -> None:
    turns, waiting = OwnerTurns(), {"a", "b"}
    order = OwnerOrder(turns, waiting.__contains__)
    for owner in "ab":
        turns.opened(owner)
        order.add(owner)
    turns.serve("a", 100)
    assert order.first() == "b"
    turns.serve("b", 150)
    assert order.first() == "a"
    turns.had_turn("a", 7)
    turns.ended("b")
    turns.opened("b")
    assert turns.served("b") == 100, "it is as if it had been served like the one that had the last turn"
    waiting.remove("a")
    assert order.first() == "b"


def test_who_was_served_much_has_its_turn_when_it_returns() -> None:
    """It owes nothing, though others have waited all the while."""
    turns, waiting = OwnerTurns(), {"a", "b"}
    order = OwnerOrder(turns, waiting.__contains__)
    for owner in "ab":
        turns.opened(owner)
        order.add(owner)
    turns.serve("a", 1000)
    assert order.first() == "b"
    turns.serve("b", 1)
    assert order.first() == "b"
    turns.serve("b", 1200)
    assert order.first() == "a"
    turns.serve("a", 2000)
    assert order.first() == "b"
    waiting.remove("a")
    turns.ended("a")
    turns.opened("a")
    waiting.add("a")
    order.add("a")
    order.check(waiting)
    assert order.first() == "a"


def test_a_prompt_of_another_owner_passes_a_queue_of_one_class_and_of_both() -> None:
    for policy, tier in (("aligned", "rt"), ("aligned", "be"), ("fcfs", "rt"), ("fcfs", "be")):
        script = Script(num_blocks=10_000, prefill_window=1, policy=policy)
        for key in range(1, 40):
            submit(script, key, "a", tier)
        first = reserved(script)[0]
        submit(script, 1000, "b", tier)
        assert not reserved(script), "the window is full"
        script.say(GATEWAY, Abort([RequestKey(first)]))
        assert reserved(script)[:1] == [1000]


def test_the_order_of_one_owner_is_that_of_arrival() -> None:
    script = Script(num_blocks=10_000, prefill_window=100, policy="fcfs")
    for key in range(1, 40):
        submit(script, key, "a")
    assert reserved(script) == [*range(1, 40)]


# ---- room on instances ----


def full(num_of_a: int = 8) -> Script:
    """A decode instance with all of its eight slots taken: by `a`, and by `b`."""
    script = Script(num_blocks=10_000, policy="fcfs")
    for key in range(1, 9):
        submit(script, key, "a" if key <= num_of_a else "b")
        script.reserve(key, [10 * key, 10 * key + 1])
        script.first_token(key)
        script.saved(key)
        script.decode(admitted=[RequestKey(key)])
    script.take()
    return script


def test_the_youngest_of_who_has_all_leaves_for_another_owner() -> None:
    script = full()
    submit(script, 20, "a")
    submit(script, 30, "b")
    script.token(1)
    for key in (20, 30):
        script.reserve(key, [10 * key, 10 * key + 1])
        script.first_token(key)
        script.saved(key)
    script.tick(0.1)
    phases = {key: script.state(key).phase for key in range(1, 9)}
    assert {key for key, phase in phases.items() if phase is Phase.MAKING_ROOM} == {8}
    script.reserve(8, [80, 81])
    script.decode(evicted=[(RequestKey(8), 6)])
    offered = [
        work.request.key for _, each in script.take() if isinstance(each, Offer) for work in each.works
    ]
    assert offered == [30], "and not the one of `a` that waits for longer"


def test_no_more_leave_while_the_first_ones_do() -> None:
    """Half of the slots are for each owner, however long the pool takes to have room."""
    script = full()
    for key in range(30, 40):
        submit(script, key, "b")
        script.reserve(key, [10 * key, 10 * key + 1])
        script.first_token(key)
        script.saved(key)
    for _ in range(5):
        script.tick(0.1)
    leaving = [key for key in range(1, 9) if script.state(key).phase is Phase.MAKING_ROOM]
    assert leaving == [5, 6, 7, 8]


def test_nobody_leaves_for_an_owner_that_has_as_much() -> None:
    script = full(num_of_a=4)
    submit(script, 30, "b")
    script.reserve(30, [300, 301])
    script.first_token(30)
    script.saved(30)
    script.tick(0.1)
    assert not any(script.state(key).phase is Phase.MAKING_ROOM for key in range(1, 9))


# ---- parts of the queue ----


def test_an_owner_fills_half_of_the_queue_and_leaves_room_for_others() -> None:
    script = Script(connect=False, max_num_queued_reqs=8)
    script.connect(GATEWAY)
    for key in range(1, 6):
        submit(script, key, "a")
    rejected = script.take_one(Rejected, GATEWAY)
    assert (rejected.key, rejected.reason) == (5, "owner_full")
    assert (
        "4 requests of this API key wait already" in rejected.message
        and "max_num_queued_reqs" in rejected.message
    )
    for key in range(11, 15):
        submit(script, key, "b")
    assert not script.take()
    submit(script, 21, "c")
    rejected = script.take_one(Rejected, GATEWAY)
    assert rejected.reason == "full"
    assert rejected.message == "many requests wait already, at most 8 may", (
        "others' count is nobody's business"
    )


def test_prompts_of_an_owner_fill_half_of_the_tokens() -> None:
    script = Script(connect=False, max_num_queued_tokens=100)
    script.connect(GATEWAY)
    submit(script, 1, "a", num_prompt=40)
    submit(script, 2, "a", num_prompt=20)
    assert script.take_one(Rejected, GATEWAY).reason == "owner_full"
    submit(script, 3, "b", num_prompt=40)
    assert not script.take()
    submit(script, 4, "c", num_prompt=30)
    rejected = script.take_one(Rejected, GATEWAY)
    assert rejected.reason == "full" and "80" not in rejected.message


def test_clients_without_keys_may_fill_the_queue() -> None:
    script = Script(connect=False, max_num_queued_reqs=8)
    script.connect(GATEWAY)
    for key in range(1, 10):
        submit(script, key, "")
    assert script.take_one(Rejected, GATEWAY).reason == "full"


# ---- aborts ----


def test_one_message_aborts_many_requests() -> None:
    script = Script(num_blocks=10_000)
    for key in range(1, 200):
        submit(script, key, "a")
    script.say("gateway-1", Abort([RequestKey(1)]))
    assert not script.state(1).is_finished, "it is of another gateway"
    script.say(GATEWAY, Abort([RequestKey(key) for key in range(1, 300)]))
    assert not len(script.router.state.requests)
    script.router.check_idle()
