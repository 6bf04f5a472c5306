"""When the next batch is formed, under `aligned`: a decode instance of 400 tokens and 8 slots."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from alignedserve.protocol.messages import Candidates, FindNear, FormBatch, Offer
from alignedserve.router.events import Connected
from alignedserve.timing.cost_presets import load_cost_model
from alignedserve.types import InstanceId, RequestKey
from tests.router.script import DECODE, GATEWAY, POOL, PREFILL, Script, decode_report, hello


def script_with(*, num_running: int, length: int, tier: str = "be", **limits: int) -> Script:
    """So many requests of this length run, as batch 1, and nothing waits. `limits`: others of the instances."""
    script = Script(connect=not limits)
    for name in (POOL, PREFILL, DECODE, GATEWAY) if limits else ():
        script.connect(name, **(limits if name != POOL else {}))
    keys = [*range(1, num_running + 1)]
    for key in keys:
        script.pooled(key, tier=tier)
    script.chosen(*keys)
    script.decode(
        admitted=[RequestKey(key) for key in keys],
        num_running=num_running,
        sum_lengths=num_running * length,
        batch_min_length=length,
        batch_max_length=length,
    )
    script.take()
    return script


def searches(script: Script) -> list[FormBatch | FindNear]:
    return [message for _, message in script.take() if isinstance(message, FormBatch | FindNear)]


def nothing_near(script: Script) -> None:
    script.say(POOL, Candidates(DECODE, [], is_batch=False))


def test_best_effort_is_held_back_while_as_much_runs_as_waits() -> None:
    script = script_with(num_running=4, length=40)
    script.pooled(11, tier="be", num_prompt=100)
    (near,) = searches(script)
    assert isinstance(near, FindNear) and near.batch == 1
    assert (near.low, near.high) == (32, 47), "the quad-tree's range with the batch's lengths"
    nothing_near(script)
    assert searches(script) == [], "160 tokens run, 107 wait"


def test_the_next_batch_takes_the_place_of_one_that_has_shrunk() -> None:
    script = script_with(num_running=1, length=40)
    script.pooled(11, tier="be", num_prompt=100)
    assert [type(each) for each in searches(script)] == [FindNear]
    nothing_near(script)
    (form,) = searches(script)
    assert isinstance(form, FormBatch) and form.replaces, "40 tokens run, 107 wait"
    script.say(POOL, Candidates(DECODE, [RequestKey(11)], is_batch=True, replaces=True))
    offer = script.take_one(Offer, DECODE)
    assert (offer.is_batch, offer.batch, offer.replaces) == (True, 2, True)


@pytest.mark.parametrize(("num_running", "num_asked"), [(2, 0), (1, 1)])
def test_a_batch_has_shrunk_by_what_requests_hold_where_layers_slide(
    num_running: int, num_asked: int
) -> None:
    """The instance has room for three requests of 120 tokens, and for 192 tokens of which nothing is passed."""
    groups: dict[str, Any] = {"window": 8, "num_full_groups": 1, "num_sliding_groups": 6}
    script = script_with(num_running=num_running, length=130, num_blocks=3 * (30 + 6 * 14), **groups)
    for key in (11, 12):
        script.pooled(key, tier="be", num_prompt=119)
    nothing_near(script)
    assert len([each for each in searches(script) if isinstance(each, FormBatch)]) == num_asked


def test_whoever_is_held_back_for_long_is_held_back_no_longer() -> None:
    script = script_with(num_running=4, length=40)
    script.pooled(11, tier="be", num_prompt=100)
    nothing_near(script)
    searches(script)
    script.tick(39.0)
    assert searches(script) == []
    script.tick(30.0)
    assert [type(each) for each in searches(script)] == [FormBatch], "20 times as long as 2 s, and a little"


def test_only_one_instance_makes_room_for_whoever_is_held_back_for_long() -> None:
    script = script_with(num_running=4, length=40)
    script.connect("decode-1")
    others = [RequestKey(key) for key in (5, 6, 7, 8)]
    for key in others:
        script.pooled(key, tier="be")
    script.say(POOL, Candidates(InstanceId("decode-1"), others, is_batch=True))
    lengths = {"num_running": 4, "sum_lengths": 160, "batch_min_length": 40, "batch_max_length": 40}
    script.say("decode-1", decode_report(admitted=others, **lengths))
    script.take()
    script.pooled(11, tier="be", num_prompt=100)
    for search in searches(script):
        script.say(POOL, Candidates(search.decode, [], is_batch=isinstance(search, FormBatch)))
    assert searches(script) == []
    script.tick(69.0)
    (form,) = searches(script)
    assert isinstance(form, FormBatch)
    script.say(POOL, Candidates(form.decode, [RequestKey(11)], is_batch=True, replaces=True))
    script.pooled(12, tier="be", num_prompt=100)
    script.tick(69.0)
    assert not any(isinstance(search, FormBatch) for search in searches(script)), "one is on its way"


def test_a_window_that_presses_is_not_held_back() -> None:
    script = script_with(num_running=4, length=40)
    script.pooled(11, tier="be", num_prompt=100, deadline_s=5.0)
    nothing_near(script)
    searches(script)
    script.tick(4.0)
    assert searches(script) == []
    script.tick(2.0)
    assert [type(each) for each in searches(script)] == [FormBatch]


def test_real_time_is_not_held_back_nor_does_anything_leave_for_it() -> None:
    script = script_with(num_running=4, length=40, tier="rt")
    script.pooled(11, tier="rt", num_prompt=20)
    (form,) = searches(script)
    assert isinstance(form, FormBatch) and not form.replaces


def test_each_decode_instance_gets_its_share_of_requests_that_begin_alike() -> None:
    script = Script()
    script.connect("decode-1")
    for key in (1, 2, 3):
        script.pooled(key, tier="be")
    script.take()
    script.say(POOL, Candidates(DECODE, [], is_batch=True))
    (form,) = searches(script)
    assert isinstance(form, FormBatch) and form.fair_share == 2


# ---- where batches do not pay ----------------------------------------------------------------------------------------


def script_of_a_balanced_kernel() -> Script:
    """Unlike lengths cost nothing there."""
    script = Script(connect=False)
    for name in (POOL, PREFILL, GATEWAY):
        script.connect(name)
    script._on(Connected(replace(hello(DECODE), cost=load_cost_model("opt-13b/a100-80gb"))))
    script.take()
    return script


def offered(script: Script) -> list[int]:
    messages = [message for _, message in script.take()]
    assert not [each for each in messages if isinstance(each, FormBatch | FindNear)]
    return [int(work.request.key) for each in messages if isinstance(each, Offer) for work in each.works]


def test_best_effort_alone_is_not_held_back_where_unlike_lengths_cost_nothing() -> None:
    script = script_of_a_balanced_kernel()
    for key, num_prompt in ((1, 6), (2, 100), (3, 7)):
        script.pooled(key, tier="be", num_prompt=num_prompt)
        assert offered(script) == [key]


def test_no_other_goes_before_a_batch_that_was_offered_earlier() -> None:
    """It was formed while there was real time."""
    script = script_of_a_balanced_kernel()
    script.pooled(1)
    script.take()
    script.chosen(1)
    assert script.take_one(Offer, DECODE).is_batch
    script.tick(61.0)
    script.pooled(2, tier="be")
    assert offered(script) == []
    script.decode(admitted=[RequestKey(1)])
    assert offered(script) == [2]


def test_real_time_that_comes_back_long_after_the_last_prompt_leaves_nothing_to_judge() -> None:
    """Beside best effort it is assigned at once, and then nothing waits."""
    script = script_of_a_balanced_kernel()
    script.running(1)
    script.running(2, tier="be")
    script.tick(200.0)
    script.token(1, wants_evicted=[RequestKey(1)])
    script.reserve(1)
    script.take()
    script.decode(evicted=[(RequestKey(1), 7)])
    assert offered(script) == [1]
