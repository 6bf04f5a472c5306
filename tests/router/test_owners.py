"""Turns of owners, their parts of the queue, and aborts of many requests at once."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from alignedserve.protocol.messages import Abort, Offer, Rejected, Reserve, Reserved, Submit
from alignedserve.router.owners import OwnerOrder, OwnerTurns
from alignedserve.router.queues import OTHERS
from alignedserve.router.requests import Phase
from alignedserve.scheduling.island import Assign
from alignedserve.types import RequestKey
from tests.router.script import DECODE, GATEWAY, POOL, PREFILL, Script, decode_report, request


def submit(script: Script, key: int, owner: str, tier: str = "rt", num_prompt: int = 6) -> None:
    script.say(GATEWAY, Submit(replace(request(key, num_prompt), owner=owner, tier=tier)))


def reserved(script: Script) -> list[int]:
    return [message.key for _, message in script.take() if isinstance(message, Reserve)]


# ---- turns ----


class Waiting:
    """Owners with open requests, of which some wait in a line."""

    def __init__(self) -> None:
        self.turns, self.owners = OwnerTurns(), set[str]()
        self.order = OwnerOrder(self.turns, self.owners.__contains__)

    def waits(self, *owners: str) -> None:
        for owner in owners:
            self.order.add(owner)
            self.owners.add(owner)

    def comes(self, *owners: str) -> None:
        for owner in owners:
            self.turns.opened(owner)
            self.waits(owner)

    def goes(self, owner: str) -> None:
        self.owners.remove(owner)
        self.turns.ended(owner)

    def start(self, count: int, num_tokens: int) -> list[str]:
        """Starts prompts. Returns their owners, which go on waiting."""
        firsts = []
        for _ in range(count):
            self.order.check(self.owners)
            firsts.append(self.order.first() or "")
            self.turns.had_turn(firsts[-1], num_tokens)
        return firsts


def test_the_least_served_owner_goes_first_and_absence_earns_nothing() -> None:
    line = Waiting()
    line.comes("a", "b")
    line.turns.serve("a", 100)
    assert line.order.first() == "b"
    line.turns.serve("b", 150)
    assert line.order.first() == "a"
    line.turns.had_turn("a", 7)
    line.goes("b")
    line.comes("c")
    assert line.turns.served("c") == 106, "it is just before the least served one"
    line.comes("b")
    assert line.turns.served("b") == 150, "it gets nothing by leaving"
    line.goes("c")
    line.goes("a")
    assert line.order.first() == "b"


def test_owners_that_come_and_go_do_not_stop_one_that_stays() -> None:
    """Each of their calls has more tokens than the staying one has got."""
    line = Waiting()
    line.comes("stays")
    line.turns.serve("stays", 100)
    line.comes("goes", "goes too")
    firsts = []
    for _ in range(40):
        firsts += line.start(1, 1000)
        if firsts[-1] != "stays":
            line.goes(firsts[-1])
            line.comes(firsts[-1])
    assert 12 <= firsts.count("stays") <= 15, firsts


def test_what_an_owner_got_while_alone_is_no_debt() -> None:
    line = Waiting()
    line.comes("a")
    line.start(1, 10)
    line.turns.serve("a", 1000)
    line.comes("b")
    assert line.start(20, 10).count("a") == 10


@pytest.mark.parametrize("is_served_by_turns", [True, False])
def test_an_idle_open_request_earns_nothing(is_served_by_turns: bool) -> None:
    """`idle` has a stream, and another one is served meanwhile: with prompts, or with the answers of a few."""
    line = Waiting()
    line.comes("idle", "busy")
    line.owners.remove("idle")
    line.start(1000 if is_served_by_turns else 1, 1000)
    line.turns.serve("busy", 0 if is_served_by_turns else 10**6)
    line.waits("idle")
    firsts = line.start(20, 10)
    assert firsts.count("busy") == 10 and "busy" in firsts[:3]
    line.comes("third")
    assert line.order.first() == "third"


def test_when_none_waits_nobody_owes_anything() -> None:
    line = Waiting()
    line.comes("idle", "busy")
    line.turns.serve("busy", 10**6)
    line.owners.clear()
    line.waits("idle", "busy")
    assert line.start(20, 10).count("busy") == 10


def test_an_owner_keeps_its_turns_while_it_waits_anywhere() -> None:
    """Requests of one class wait for prefill, and in the pool."""
    line = Waiting()
    pooled = {"a"}
    OwnerOrder(line.turns, pooled.__contains__).add("a")
    line.comes("b")
    line.start(1, 1000)
    line.comes("a")
    assert line.start(10, 100)[:9] == ["a"] * 9


def test_a_start_out_of_turn_does_not_put_newcomers_behind_those_that_wait() -> None:
    script = Script(connect=False, policy="fcfs")
    script.connect(GATEWAY)
    for key, owner in ((1, "waits"), (2, "starts")):
        submit(script, key, owner)
    queue = script.router.state.prefill_queue
    queue.turns(True).serve("waits", 10)
    queue.turns(True).serve("starts", 1000)
    queue.take(script.state(2))
    submit(script, 3, "new")
    assert queue.next_owner(True) == "new"


def test_served_work_is_forgotten_when_the_level_has_passed_it_and_when_nothing_is_open() -> None:
    line = Waiting()
    line.comes("a", "b")
    line.turns.serve("a", 1000)
    line.goes("a")
    assert line.turns.owners == {"a", "b"}
    line.start(2, 1200)
    assert line.turns.owners == {"b"}
    line.goes("b")
    assert not line.turns.owners
    line.comes("a")
    assert line.turns.served("a") == 2400, "it never falls"


def test_who_left_with_more_than_others_waits_until_they_have_as_much() -> None:
    line = Waiting()
    line.comes("a", "b")
    line.turns.serve("a", 3000)
    line.turns.serve("b", 1200)
    assert line.order.first() == "b"
    line.goes("a")
    line.comes("a")
    line.order.check(line.owners)
    assert line.order.first() == "b"
    line.turns.serve("b", 2000)
    line.order.check(line.owners)
    assert line.order.first() == "a"


def flooded(policy: str = "fcfs", tier: str = "rt", **options: Any) -> Script:
    """The window of what is started ahead is full of prompts of `a`: of 32 tokens, or of 8 requests."""
    script = Script(num_blocks=10_000, prefill_window=1, policy=policy)
    for key in range(1, 40):
        submit(script, key, "a", tier, **options)
    return script


@pytest.mark.parametrize(("policy", "tier"), [("aligned", "rt"), ("fcfs", "rt"), ("fcfs", "be")])
def test_a_prompt_of_another_owner_passes_a_queue_and_a_full_window(policy: str, tier: str) -> None:
    script = flooded(policy, tier)
    first = reserved(script)[0]
    submit(script, 1000, "b", tier)
    assert reserved(script) == [1000]
    script.say(GATEWAY, Abort([RequestKey(first)]))
    assert not reserved(script), "what is beyond the window counts"


def test_best_effort_of_another_owner_is_next_in_the_window_of_its_class() -> None:
    script = flooded("aligned", "be")
    first = reserved(script)[0]
    submit(script, 1000, "b", "be")
    assert not reserved(script), "the window is full"
    script.say(GATEWAY, Abort([RequestKey(first)]))
    assert reserved(script)[:1] == [1000]


@pytest.mark.parametrize(("num_prompt", "num_of_b", "num_of_all"), [(1, 4, 8), (6, 3, 5)])
def test_owners_start_their_parts_of_another_window_beyond_a_full_one(
    num_prompt: int, num_of_b: int, num_of_all: int
) -> None:
    """The window is full of requests if those are short, and otherwise of tokens."""
    script = flooded(num_prompt=num_prompt)
    script.take()
    for key in range(100, 140):
        submit(script, key, "b", num_prompt=num_prompt)
    started = reserved(script)
    assert started == [*range(100, 100 + num_of_b)]
    for key, owner in enumerate("cdefghijklmnop", start=200):
        submit(script, key, owner, num_prompt=num_prompt)
        submit(script, 100 + key, owner, num_prompt=num_prompt)
    started += reserved(script)
    assert 200 in started and len(started) == num_of_all, "all together start at most another window"


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


# ---- what fits nowhere ----


def offered(script: Script) -> list[int]:
    return [work.request.key for _, each in script.take() if isinstance(each, Offer) for work in each.works]


def pooled(script: Script, key: int, owner: str, num_prompt: int = 6) -> None:
    submit(script, key, owner, num_prompt=num_prompt)
    script.reserve(key)
    script.first_token(key)
    script.saved(key)


def beside_a_large_one() -> Script:
    """`a` has the turn with a request that does not fit beside the one of `b` which runs."""
    script = Script(policy="fcfs", connect=False, max_num_queued_tokens=10**6)
    for name, num_blocks in ((POOL, 10_000), (PREFILL, 100), (DECODE, 40), (GATEWAY, 100)):
        script.connect(name, num_blocks=num_blocks)
    pooled(script, 1, "b", 60)
    script.decode(admitted=[RequestKey(1)], num_free_blocks=20)
    pooled(script, 2, "a", 100)
    script.router.state.prefill_queue.turns(True).serve("b", 10_000)
    assert offered(script) == [1] and script.state(2).phase is Phase.POOLED
    return script


def test_a_request_that_fits_nowhere_lets_others_pass() -> None:
    script = beside_a_large_one()
    pooled(script, 3, "b")
    assert offered(script) == [3]


def test_others_pass_a_large_request_only_for_so_long() -> None:
    script = beside_a_large_one()
    num_passed = 0
    for key in range(3, 1000):
        pooled(script, key, "b")
        if script.state(key).phase is Phase.POOLED:
            break
        num_passed += 1
        script.decode(admitted=[RequestKey(key)], num_free_blocks=20)
        script.say(GATEWAY, Abort([RequestKey(key)]))
        script.gone(DECODE, key)
    # They have 7 tokens each, and the large one has 101.
    assert num_passed == -(-OTHERS * 101 // 7)
    script.say(GATEWAY, Abort([RequestKey(1)]))
    script.gone(DECODE, 1)
    script.decode(num_free_blocks=40)
    assert script.state(2).phase is Phase.OFFERED, "it goes first when it fits"


def test_a_request_that_the_pool_refuses_is_counted_once() -> None:
    script = Script(policy="fcfs")
    submit(script, 1, "a", num_prompt=20)
    for _ in range(5):
        script.say(POOL, Reserved(RequestKey(1), None))
        script.tick(1.0)
    assert script.state(1).phase is Phase.RESERVING
    assert script.router.state.prefill_queue.turns(True).served("a") == 20
    script.reserve(1)
    script.first_token(1)
    assert script.router.state.prefill_queue.turns(True).served("a") == 21
    assert not script.state(1).num_counted, "if it is computed again, it is counted again"


# ---- room, once ----


def with_room_made() -> Script:
    """Room is made for request 30 of `b`: request 8 of `a` leaves."""
    script = full()
    pooled(script, 30, "b")
    script.tick(0.1)
    assert script.state(8).phase is Phase.MAKING_ROOM
    script.reserve(8, [80, 81])
    script.decode(evicted=[(RequestKey(8), 6)])
    assert script.state(30).phase is Phase.OFFERED
    script.take()
    return script


def evicted(script: Script) -> set[int]:
    return {key for key in range(1, 9) if script.state(key).phase in (Phase.MAKING_ROOM, Phase.EVICTING)}


def test_room_is_made_once_for_a_request_that_is_not_admitted_next() -> None:
    script = with_room_made()
    # The instance has given the slot to another one.
    pooled(script, 40, "a")
    script.router._decode.take(Assign(DECODE, [script.state(40)]))
    script.decode(admitted=[RequestKey(40)])
    assert script.state(40).phase is Phase.RUNNING
    for _ in range(10):
        script.token(1)
        script.now += 0.1
    assert not evicted(script)
    assert script.state(30).phase is Phase.OFFERED


def test_a_victim_without_room_in_the_pool_is_asked_for_once_per_tick() -> None:
    script = full()
    pooled(script, 30, "b")
    script.token(1)
    assert reserved(script)[-1:] == [8]
    asked = []
    for _ in range(10):
        script.say(POOL, Reserved(RequestKey(8), None))
        script.now += 0.01
        script.token(1)
        asked += reserved(script)
    assert not asked
    script.tick(0.5)
    script.tick(0.5)
    assert 8 in reserved(script)


def test_a_report_makes_room_at_its_sender_only() -> None:
    script = full()
    script.connect("decode-1", num_blocks=5)
    pooled(script, 9, "c")
    script.say("decode-1", decode_report(admitted=[RequestKey(9)], num_free_blocks=0))
    pooled(script, 30, "b")
    script.say("decode-1", decode_report(num_free_blocks=0))
    assert not evicted(script)
    script.token(1)
    assert evicted(script) == {8}


def test_the_owner_with_the_next_fewest_slots_gets_room_too() -> None:
    """`b`, with the fewest, waits with a request for which nobody may leave."""
    script = Script(policy="fcfs", connect=False)
    for name, num_blocks in ((POOL, 10_000), (PREFILL, 100), (DECODE, 40), (GATEWAY, 100)):
        script.connect(name, num_blocks=num_blocks)
    for key in range(1, 9):
        pooled(script, key, "a")
        script.decode(admitted=[RequestKey(key)], num_free_blocks=40 - 3 * key)
    pooled(script, 20, "b", 120)
    script.router.state.prefill_queue.turns(True).serve("c", 10_000)
    pooled(script, 30, "c")
    script.tick(0.1)
    assert evicted(script) == {8}
    assert script.state(20).phase is Phase.POOLED


def test_what_an_instance_was_offered_of_the_victims_owner_is_taken_back() -> None:
    script = full(num_of_a=8)
    pooled(script, 20, "a")
    state = script.router.state
    view = state.cluster.decodes[0]
    waiting = script.state(20)
    # As aligned's batches do, it waits there for a slot.
    script.router._decode.take(Assign(view.instance_id, [waiting], is_batch=True))
    pooled(script, 30, "b")
    script.tick(0.1)
    assert evicted(script) == {8}
    assert waiting.leaving
    script.gone(DECODE, 20)
    assert waiting.phase is Phase.POOLED


# ---- parts of the queue ----


def test_an_owner_fills_half_of_the_queue_and_leaves_room_for_others() -> None:
    script = Script(connect=False, max_num_queued_reqs=8)
    script.connect(GATEWAY)
    for key in range(1, 6):
        submit(script, key, "a")
    rejected = script.take_one(Rejected, GATEWAY)
    assert (rejected.key, rejected.reason) == (5, "owner_full")
    assert (
        "4 requests from this API key wait already" in rejected.message
        and "max_num_queued_reqs" in rejected.message
    )
    for key in range(11, 14):
        submit(script, key, "b")
    rejected = script.take_one(Rejected, GATEWAY)
    assert (rejected.key, rejected.reason) == (13, "owner_full"), (
        "of 8, 4 are of `a`, 2 of `b`, and 2 are free"
    )
    assert "2 requests from this API key" in rejected.message
    for key, owner in enumerate("cde", start=21):
        submit(script, key, owner)
    rejected = script.take_one(Rejected, GATEWAY)
    assert (rejected.key, rejected.reason) == (23, "full")
    assert rejected.message == "many requests wait already, at most 8 may", (
        "others' count is nobody's business"
    )


def test_two_owners_that_want_much_get_a_third_each_and_leave_room_for_others() -> None:
    script = Script(connect=False, max_num_queued_reqs=99, max_num_queued_tokens=10**6)
    script.connect(GATEWAY)
    for key in range(1, 99):
        submit(script, key, "a")
        submit(script, 100 + key, "b")
    refused = [message.key for _, message in script.take() if isinstance(message, Rejected)]
    assert refused == [each for key in range(34, 99) for each in (key, 100 + key)]
    submit(script, 300, "c")
    assert not script.take()


def test_streams_that_have_begun_are_taken_back_by_a_new_router_however_many_wait() -> None:
    """Before the restart they ran, and had no place in the queue."""
    script = Script(connect=False, max_num_queued_reqs=99, max_num_queued_tokens=10**6)
    script.connect(GATEWAY)
    for key in range(1, 60):
        script.say(GATEWAY, Submit(replace(request(key), owner="a"), delivered=[1]))
    for key in range(100, 130):
        script.say(GATEWAY, Submit(replace(request(key), owner="b"), delivered=[1]))
    assert not any(isinstance(message, Rejected) for _, message in script.take())


def test_two_owners_with_many_tokens_get_a_third_each() -> None:
    script = Script(connect=False, max_num_queued_tokens=1000)
    script.connect(GATEWAY)
    for key in range(1, 80):
        submit(script, key, "a", num_prompt=10)
        submit(script, 100 + key, "b", num_prompt=10)
    rejected = [message for _, message in script.take() if isinstance(message, Rejected)]
    assert min(message.key for message in rejected) == 34
    assert "330 prompt tokens from this API key" in rejected[0].message
    submit(script, 300, "c", num_prompt=300)
    assert not script.take()


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
