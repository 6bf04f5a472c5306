"""Real time finds prefill instances without best effort; best effort is computed no further ahead than it is needed."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from alignedserve.protocol.messages import Abort, Prefill, Rejected, Reserve, Submit
from alignedserve.router.views import PrefillView
from alignedserve.scheduling.policies.aligned.router.prompts import STOCK, place_best_effort, place_real_time
from alignedserve.timing.sliding import MEMORY_S
from alignedserve.types import InstanceId, RequestKey
from tests.router.script import GATEWAY, PREFILL, Script, hello, request

SECOND = InstanceId("prefill-1")
NUM_SLOTS = 8
RT, BE = RequestKey(1), RequestKey(2)


def two() -> Script:
    """Prefill instances, and a decode instance of so many slots."""
    script = Script(connect=False)
    for name in ("kvpool", PREFILL, SECOND, "decode-0", GATEWAY):
        script.connect(name, num_blocks=1000)
    script.take()
    return script


def view(instance_id: str, rt: int, be: int) -> PrefillView:
    """With so many tokens of each class to compute."""
    found = PrefillView(hello(instance_id))
    found.pending.put(RT, rt, is_rt=True, owner="")
    found.pending.put(BE, be, is_rt=False, owner="")
    return found


def submit(script: Script, key: int, tier: str, num_prompt: int = 6) -> None:
    script.say(GATEWAY, Submit(replace(request(key, num_prompt), tier=tier)))


def placed(script: Script, key: int, tier: str, num_prompt: int = 6) -> str:
    """The instance that it goes to."""
    submit(script, key, tier, num_prompt)
    script.take()
    script.reserve(key, [10 * key, 10 * key + 1])
    return next(name for name, message in script.take() if isinstance(message, Prefill))


def num_asked(script: Script) -> int:
    """Requests for which room in the pool was asked since the last time: they are started."""
    return sum(isinstance(message, Reserve) for _, message in script.take())


def test_without_real_time_best_effort_is_spread() -> None:
    script = two()
    assert {placed(script, 1, "be"), placed(script, 2, "be")} == {PREFILL, SECOND}


def test_beside_real_time_best_effort_stays_together_and_real_time_goes_elsewhere() -> None:
    script = two()
    first = placed(script, 1, "rt")
    script.say(GATEWAY, Abort([RequestKey(1)]))
    script.gone(first)
    homes = {placed(script, key, "be") for key in (2, 3)}
    (home,) = homes
    assert placed(script, 4, "rt") != home
    assert placed(script, 5, "be") == home
    script.tick(MEMORY_S + 1)
    # it is forgotten: the one with less to do, though that has none of best effort
    assert placed(script, 6, "be") != home


@pytest.mark.parametrize(
    ("first", "second", "better"),
    [
        # one iteration (32 tokens) of best effort is all that it waits for
        ((0, 500), (40, 0), 0),
        ((0, 500), (20, 0), 1),
        ((0, 20), (0, 10), 1),
        ((20, 500), (20, 0), 1),
        ((0, 500), (0, 200), 1),
    ],
)
def test_real_time_goes_where_it_waits_least(
    first: tuple[int, int], second: tuple[int, int], better: int
) -> None:
    views = [view(PREFILL, *first), view(SECOND, *second)]
    assert place_real_time(views, lambda view: 0, is_colocated=False) is views[better]


def test_of_two_where_it_waits_as_long_it_goes_where_least_decodes() -> None:
    views = [view(PREFILL, 0, 0), view(SECOND, 0, 0)]
    views[0].num_free_blocks -= 1
    assert place_real_time(views, lambda view: 0, is_colocated=True) is views[1]
    assert place_real_time(views, lambda view: 0, is_colocated=False) is views[0]


@pytest.mark.parametrize(
    ("first", "second", "better"),
    [
        ((0, 10), (0, 0), 0),
        ((0, 0), (0, 10), 1),
        ((90, 10), (0, 0), 0),
        # no room in its window, two iterations
        ((0, 64), (0, 0), 1),
        ((0, 70), (0, 65), 1),
    ],
)
def test_best_effort_goes_where_best_effort_is_while_there_is_room(
    first: tuple[int, int], second: tuple[int, int], better: int
) -> None:
    views = [view(PREFILL, *first), view(SECOND, *second)]
    assert place_best_effort(views, num_iterations=2) is views[better]


def test_beside_real_time_so_much_best_effort_is_ready_and_no_more() -> None:
    script = two()
    for key in range(100, 100 + 3 * NUM_SLOTS):
        submit(script, key, "be", num_prompt=1)
    assert num_asked(script) == 3 * NUM_SLOTS, "nothing holds it back where there is no real time"
    script = two()
    placed(script, 1, "rt")
    for key in range(100, 100 + 3 * NUM_SLOTS):
        submit(script, key, "be", num_prompt=1)
    most = math.ceil(STOCK * NUM_SLOTS)
    assert num_asked(script) == most
    # one leaves, one comes
    script.reserve(100, [20])
    script.say(GATEWAY, Abort([RequestKey(100)]))
    script.gone(PREFILL, 100)
    script.gone(SECOND, 100)
    assert num_asked(script) == 1
    # nor does it hold real time back
    submit(script, 2, "rt", num_prompt=1)
    assert num_asked(script) == 1
    # when real time is forgotten, all goes on
    script.tick(MEMORY_S + 1)
    assert num_asked(script) == 2 * NUM_SLOTS - 1


def test_best_effort_that_fills_the_queue_is_no_reason_to_refuse_real_time() -> None:
    script = Script(max_num_queued_reqs=2, max_num_queued_tokens=20)
    # nothing gets room in the pool, so all wait
    for key in (1, 2, 3):
        submit(script, key, "be")
    assert script.take_one(Rejected, GATEWAY).key == RequestKey(3)
    for key in (4, 5, 6):
        submit(script, key, "rt")
    assert script.take_one(Rejected, GATEWAY).key == RequestKey(6)


def test_without_classes_all_wait_in_one_queue() -> None:
    script = Script(policy="fcfs", max_num_queued_reqs=2)
    for key in (1, 2, 3):
        submit(script, key, "be" if key < 3 else "rt")
    assert script.take_one(Rejected, GATEWAY).key == RequestKey(3)
