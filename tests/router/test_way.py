"""The path of a request when nothing goes wrong, and what is refused."""

from __future__ import annotations

from itertools import chain

import msgspec
import pytest

from alignedserve.protocol.messages import (
    Abort,
    Commit,
    Evict,
    Failed,
    FindNear,
    FormBatch,
    MakeSpare,
    NewTokens,
    Offer,
    Prefill,
    Rejected,
    Release,
    Reserve,
    Reserved,
    Stage,
    Submit,
    Tokens,
    Unstage,
    UsePool,
    Welcome,
)
from alignedserve.router.events import Connected
from alignedserve.router.requests import Phase
from alignedserve.types import RequestKey
from tests.router.script import (
    DECODE,
    GATEWAY,
    ONE,
    POOL,
    PREFILL,
    Script,
    hello,
    pool_blocks,
    prefill_report,
    request,
)


def test_processes_are_welcomed_and_told_of_the_pool() -> None:
    script = Script(connect=False)
    script.connect(PREFILL)
    assert [type(message) for _, message in script.take()] == [Welcome]
    script.connect(POOL)
    assert [(to, type(message)) for to, message in script.take()] == [(POOL, Welcome), (PREFILL, UsePool)]
    script.connect(DECODE)
    assert [(to, type(message)) for to, message in script.take()] == [(DECODE, Welcome), (DECODE, UsePool)]


def test_from_submission_to_the_last_token() -> None:
    script = Script()
    script.submit()
    assert script.take_reserve() == (ONE, 6)
    script.reserve()
    work = script.take_one(Prefill, PREFILL).works[0]
    assert (work.num_cached, work.blocks, work.output) == (0, [10, 11], [])
    script.first_token()
    assert script.take_one(Tokens, GATEWAY).news == [NewTokens(ONE, 0, [50])]
    script.saved()
    sent = dict(script.take())
    assert isinstance(sent[POOL], FormBatch)
    script.chosen(1)
    offer = script.take_one(Offer, DECODE)
    assert offer.is_batch and offer.source is None
    assert (offer.works[0].num_cached, offer.works[0].output) == (6, [50])
    script.decode(admitted=[ONE])
    assert script.take_one(MakeSpare, POOL).keys == [ONE]
    script.token()
    assert script.take_one(Tokens, GATEWAY).news == [NewTokens(ONE, 1, [60])]
    script.token(token=61, finish_reason="stop")
    assert script.take_one(Release, POOL).keys == [ONE]
    script.router.check_idle()


def test_a_request_that_ends_with_its_first_token_is_called_back_before_its_blocks_are_free() -> None:
    script = Script()
    script.submit(max_tokens=1)
    script.reserve()
    script.take()
    script.first_token(finish_reason="length")
    sent = script.take()
    assert (PREFILL, Abort([ONE])) in sent and not any(isinstance(message, Release) for _, message in sent)
    script.gone(PREFILL)
    assert script.take_one(Release, POOL).keys == [ONE]
    script.router.check_idle()


@pytest.mark.parametrize("stage", ["submit", "reserve", "pooled", "running"])
def test_abort(stage: str) -> None:
    script = Script()
    script.submit()
    if stage == "reserve":
        script.reserve()
    elif stage != "submit":
        script = Script()
        getattr(script, stage)()
    script.take()
    script.say(GATEWAY, Abort([ONE]))
    place = {"reserve": PREFILL, "running": DECODE}.get(stage)
    if place:
        assert script.take_one(Abort, place).keys == [ONE]
        script.gone(place)
    assert script.take_one(Release, POOL).keys == [ONE]
    script.router.check_idle()


def test_nobody_aborts_what_is_anothers() -> None:
    script = Script()
    script.connect("gateway-1")
    script.running()
    script.say("gateway-1", Abort([ONE]))
    assert script.state().phase is Phase.RUNNING


def test_too_long_full_and_duplicate_are_refused() -> None:
    script = Script(max_num_queued_reqs=1)
    script.submit(num_prompt=200)
    assert script.take_one(Rejected, GATEWAY).reason == "too_long"
    script.submit()
    script.take()
    script.submit(key=2)
    assert script.take_one(Rejected, GATEWAY).reason == "full"
    script.reserve()
    script.say(GATEWAY, Abort([ONE]))
    script.take()
    script.submit()
    assert script.take_one(Rejected, GATEWAY).reason == "duplicate"


def test_what_fits_no_memory_is_refused_with_both_numbers() -> None:
    script = Script(num_blocks=20)
    script.submit(num_prompt=70, max_tokens=11)
    assert "need 21 blocks of KV, and there are at most 20" in script.take_one(Rejected, GATEWAY).message
    script.submit(num_prompt=70, max_tokens=10)
    assert script.take_one(Reserve, POOL).key == ONE


def test_prefill_goes_in_order_of_arrival_and_not_further_ahead_than_the_window() -> None:
    script = Script()
    for key, arrival_s in ((1, 3.0), (2, 2.0), (3, 1.0)):
        script.submit(key, num_prompt=60, arrival_s=arrival_s)
    assert [message.key for _, message in script.take() if isinstance(message, Reserve)] == [1, 2]
    script.reserve(1)
    script.reserve(2)
    script.first_token(1)
    script.saved(1)
    assert [message.key for _, message in script.take() if isinstance(message, Reserve)] == [3]


def test_no_room_in_the_pool_holds_prefill_until_something_is_released() -> None:
    script = Script()
    script.running(1)
    script.submit(2)
    script.take()
    script.say(POOL, Reserved(RequestKey(2), None))
    script.submit(3)
    assert not script.take()
    script.token(1, finish_reason="stop")
    assert {message.key for _, message in script.take() if isinstance(message, Reserve)} == {2, 3}


def test_few_ask_a_full_pool_each_time_that_room_may_be_there() -> None:
    """Twice as many with each grant. A hundred that wait do not all ask for a few blocks."""
    script = Script(policy="fcfs", prefill_window=1000)

    def asked() -> list[RequestKey]:
        return [message.key for _, message in script.take() if isinstance(message, Reserve)]

    def refuse(keys: list[RequestKey]) -> None:
        for key in keys:
            script.say(POOL, Reserved(key, None))

    for key in range(1, 101):
        script.now += 0.001
        script.submit(key)
    first = asked()
    assert len(first) == 100, "nothing was refused yet"
    refuse(first)
    for _ in range(3):
        assert not asked()
        script.tick(0.1)
        first = asked()
        assert first == [1, 2, 3, 4]
        refuse(first)
    script.tick(0.1)
    assert asked() == [1, 2, 3, 4]
    script.reserve(1)
    assert asked() == [5, 6, 7, 8, 9], "one of eight has its answer"
    refuse([RequestKey(2)])
    script.reserve(3)
    assert not asked(), "none does until blocks may have been released"
    script.tick(0.1)
    assert asked() == [2, 10], "six others of eight ask"


def test_eviction_goes_to_the_pool_and_back() -> None:
    script = Script()
    script.running()
    script.token()
    script.take()
    script.decode(wants_evicted=[ONE])
    # six prompt tokens, two sampled, and two blocks of slack
    assert script.take_reserve() == (ONE, 16)
    script.reserve(blocks=[10, 11, 12, 13])
    assert script.take_one(Evict, DECODE) == Evict(ONE, pool_blocks(10, 11, 12, 13), 6)
    script.decode(evicted=[(ONE, 7)])
    commit = next(message for _, message in script.take() if isinstance(message, Commit))
    assert (commit.key, commit.num_tokens, commit.is_candidate) == (ONE, 7, True)
    script.chosen(1)
    assert script.take_one(Offer, DECODE).works[0].output == [50, 60]


def test_an_eviction_that_failed_leaves_it_running() -> None:
    script = Script()
    script.running()
    script.decode(wants_evicted=[ONE])
    script.reserve(blocks=[10, 11, 12, 13])
    script.take()
    script.say(DECODE, Failed(ONE, "evict", "no"))
    assert not script.take(), "nothing is tried again before the next tick"
    script.decode()
    script.tick(0.1)
    assert script.state().phase is Phase.RUNNING
    assert script.take_one(MakeSpare, POOL).keys == [ONE], "nobody needs the room that was made"


def test_an_eviction_that_failed_and_is_still_wanted_is_tried_again() -> None:
    script = Script()
    script.running()
    script.decode(wants_evicted=[ONE])
    script.reserve(blocks=[10, 11, 12, 13])
    script.take()
    script.say(DECODE, Failed(ONE, "evict", "no"))
    script.tick(0.1)
    assert [type(message) for _, message in script.take()] == [MakeSpare, Reserve]
    assert script.state().phase is Phase.MAKING_ROOM


def test_a_copy_that_failed_is_no_matter_once_the_request_is_elsewhere() -> None:
    script = Script()
    script.pooled()
    script.chosen(1)
    script.take()
    script.say(DECODE, Failed(ONE, "pull", "no"))
    script.decode(admitted=[ONE])
    script.take()
    script.tick(0.1)
    assert not script.take() and script.state().phase is Phase.RUNNING


def without_room(script: Script) -> None:
    """A victim, and a full pool."""
    script.running()
    script.token()
    script.decode(wants_evicted=[ONE])
    script.take()
    script.say(POOL, Reserved(ONE, None))
    assert not script.take()


def test_an_eviction_without_room_is_asked_for_again_and_loses_nothing() -> None:
    script = Script()
    without_room(script)
    for _ in range(50):
        script.tick(0.1)
        assert script.take_reserve() == (ONE, 16)
        script.say(POOL, Reserved(ONE, None))
        # it has blocks left, or others give some back: it goes on
        script.token(wants_evicted=[ONE])
        script.take()
    script.tick(0.1)
    script.reserve(blocks=[10, 11, 12, 13])
    assert [type(message) for to, message in script.take() if to == DECODE] == [Evict]
    assert script.router.state.counters.of(DECODE).num_preemptions == 1


def test_an_eviction_that_is_not_wanted_any_more_is_forgotten() -> None:
    script = Script()
    without_room(script)
    script.decode()
    assert script.take_one(MakeSpare, POOL).keys == [ONE]
    assert script.state().phase is Phase.RUNNING
    view = script.router.state.cluster.decode(DECODE)
    assert view and not view.refused
    script.tick(5.0)
    assert not script.take()


def test_a_victim_without_room_is_recomputed_when_nothing_moves_any_more() -> None:
    script = Script()
    without_room(script)
    script.tick(0.9)
    assert script.take_one(Reserve, POOL).key == ONE
    script.say(POOL, Reserved(ONE, None))
    script.tick(0.2)
    assert script.take_one(Abort, DECODE).keys == [ONE]
    assert script.router.state.counters.num_recomputed == 1
    script.gone(DECODE)
    assert script.take_one(Reserve, POOL).key == ONE
    script.reserve()
    work = script.take_one(Prefill, PREFILL).works[0]
    assert (work.num_cached, work.output) == (6, [50, 60])


def test_staging_on_the_way_to_a_link() -> None:
    script = Script(link="gloo")
    script.pooled()
    script.chosen(1)
    stage = script.take_one(Stage, PREFILL)
    assert (stage.decode, [work.request.key for work in stage.works]) == (DECODE, [1])
    script.say(PREFILL, prefill_report(staged=[ONE]))
    assert script.take_one(Offer, DECODE).source == PREFILL
    script.decode(admitted=[ONE])
    assert (PREFILL, Unstage([ONE])) in script.take()
    script.token(finish_reason="stop")
    script.router.check_idle()


def test_a_batch_is_staged_over_all_prefill_instances_that_have_room() -> None:
    script = Script(link="gloo")
    script.connect("prefill-1", num_staging_blocks=50)
    script.connect("prefill-2", num_staging_blocks=0)
    keys = (1, 2, 3, 4)
    for key in keys:
        script.pooled(key, num_prompt=12)
    script.take()
    script.chosen(*keys)
    stages = {name: message for name, message in script.take() if isinstance(message, Stage)}
    assert sorted(stages) == ["prefill-0", "prefill-1"]
    staged = {name: [work.request.key for work in each.works] for name, each in stages.items()}
    assert sorted(map(len, staged.values())) == [2, 2] and sorted(chain.from_iterable(staged.values())) == [
        *keys
    ]
    for name, some in staged.items():
        script.say(name, prefill_report(staged=some))
        offer = script.take_one(Offer, DECODE)
        assert (offer.source, offer.is_batch, offer.batch) == (name, True, 1)


def test_what_does_not_fit_the_buffer_is_fetched_from_the_pool() -> None:
    script = Script(link="gloo", num_staging_blocks=5)
    for key, num_prompt in ((1, 24), (2, 8), (3, 12), (4, 4)):
        script.pooled(key, num_prompt=num_prompt)
    script.take()
    script.chosen(1, 2, 3, 4)
    sent = script.take()
    (offer,) = [message for _, message in sent if isinstance(message, Offer)]
    (stage,) = [message for _, message in sent if isinstance(message, Stage)]
    assert [work.request.key for work in offer.works] == [1, 4] and offer.source is None
    assert [work.request.key for work in stage.works] == [2, 3], "five blocks; the first needs six"
    script.say(PREFILL, prefill_report(staged=[RequestKey(2), RequestKey(3)]))
    script.decode(admitted=[RequestKey(2)])
    script.pooled(5, num_prompt=8)
    script.pooled(6, num_prompt=4)
    script.take()
    script.chosen(5, 6, is_batch=False)
    assert [work.request.key for work in script.take_one(Stage, PREFILL).works] == [5], (
        "two blocks are free again"
    )


def test_requests_of_like_length_are_looked_for_beside_a_running_batch() -> None:
    script = Script()
    script.running(1)
    script.take()
    script.pooled(2)
    assert any(isinstance(message, FormBatch) for _, message in script.take())
    script.chosen(2)
    script.take()
    script.pooled(3)
    near = next(message for _, message in script.take() if isinstance(message, FindNear))
    assert (near.low, near.high) == (7, 7)
    script.chosen(3, is_batch=False)
    assert not script.take_one(Offer, DECODE).is_batch


def searches(script: Script, kind: type[FormBatch] | type[FindNear]) -> int:
    return sum(isinstance(message, kind) for _, message in script.take())


def test_a_search_that_found_something_is_made_again_without_anything_new() -> None:
    script = Script()
    script.pooled(1)
    script.pooled(2)
    assert searches(script, FormBatch) == 1
    script.chosen(1)
    script.decode(admitted=[ONE])
    assert searches(script, FormBatch) == 1


def test_a_search_that_found_nothing_is_made_again_when_there_is_something_new() -> None:
    script = Script()
    script.pooled(1)
    assert searches(script, FormBatch) == 1
    script.chosen()
    script.tick(1.0)
    assert searches(script, FormBatch) == 0
    script.pooled(2)
    assert searches(script, FormBatch) == 1


def test_a_batch_holds_the_longest_request() -> None:
    script = Script(batch_share=0.01)
    script.pooled()
    form = next(message for _, message in script.take() if isinstance(message, FormBatch))
    assert form.max_blocks == 200 // 4


def test_a_batch_that_waits_too_long_is_not_overtaken_any_more() -> None:
    script = Script(starvation_s=1.0)
    script.running(1)
    script.pooled(2)
    script.chosen(2)
    script.take()
    script.pooled(3)
    assert searches(script, FindNear) == 1
    script.chosen(is_batch=False)
    script.tick(1.1)
    script.pooled(4)
    assert searches(script, FindNear) == 0


def test_patience_grows_with_what_waits() -> None:
    """A decode instance holds 400 tokens; 7 wait, then 107."""
    script = Script(starvation_s=1.0)
    script.pooled(1)
    forms = [message for _, message in script.take() if isinstance(message, FormBatch | Commit)]
    assert forms[0].due_s == pytest.approx(1.0 + 7 / 400)  # type: ignore[union-attr]
    assert forms[1].starvation_s == pytest.approx(1.0 + 7 / 400)  # type: ignore[union-attr]
    script.pooled(2, num_prompt=99)
    (commit,) = [message for _, message in script.take() if isinstance(message, Commit)]
    assert commit.due_s == pytest.approx(1.0 + 107 / 400)
    script.chosen(1, 2)
    assert script.router.state.decode_queue.num_tokens == 0


def test_fcfs_offers_at_once_what_fits() -> None:
    script = Script(policy="fcfs")
    script.pooled()
    sent = [message for _, message in script.take() if isinstance(message, Commit | Offer | FormBatch)]
    assert [type(message) for message in sent] == [Commit, Commit, Offer]
    assert not sent[1].is_candidate  # type: ignore[union-attr]


def test_fcfs_offers_what_takes_all_there_is() -> None:
    script = Script(policy="fcfs", num_blocks=20)
    script.submit(num_prompt=78, max_tokens=2)
    script.reserve(blocks=list(range(20)))
    script.first_token()
    script.saved()
    assert script.take_one(Offer, DECODE).works[0].output == [50]


def test_a_request_submitted_again_gets_what_it_missed() -> None:
    script = Script()
    script.running()
    script.token()
    script.connect("gateway-1")
    script.take()
    script.say("gateway-1", Submit(request(), delivered=[50]))
    assert script.take_one(Tokens, "gateway-1").news == [NewTokens(ONE, 1, [60])]


def test_tokens_out_of_turn_are_an_error() -> None:
    script = Script()
    script.running()
    with pytest.raises(RuntimeError, match="has 1 tokens, but 5 come before the new ones"):
        script.decode(news=[NewTokens(ONE, 5, [1])])


def test_an_offer_says_where_to_pull_from() -> None:
    script = Script(link="gloo")
    script.close(PREFILL)
    prefill = msgspec.structs.replace(hello(PREFILL, epoch=2), link="127.0.0.1:9")
    script.router.on(Connected(prefill), script.now)
    script.pooled()
    script.chosen(1)
    script.take()
    script.say(PREFILL, prefill_report(staged=[ONE]))
    offer = script.take_one(Offer, DECODE)
    assert (offer.source, offer.address) == (PREFILL, "127.0.0.1:9")


def num_queued_tokens(script: Script) -> int:
    """Tokens of all classes."""
    return script.router.state.prefill_queue.waiting_before(is_rt=False)[1]


def test_so_many_tokens_wait_and_no_more() -> None:
    script = Script(max_num_queued_tokens=40)
    # one alone is taken, however long it is; this one waits for room in the pool
    script.submit(1, num_prompt=60)
    script.submit(2, num_prompt=6)
    assert num_queued_tokens(script) == 60
    rejected = script.take_one(Rejected, GATEWAY)
    assert (rejected.key, rejected.reason) == (RequestKey(2), "full")
    assert "60 tokens wait for prefill already" in rejected.message
    script.say(GATEWAY, Abort([ONE]))
    assert num_queued_tokens(script) == 0
    for key in range(3, 9):
        script.submit(key, num_prompt=6)
    assert num_queued_tokens(script) == 36
    script.submit(9, num_prompt=6)
    assert script.take_one(Rejected, GATEWAY).key == RequestKey(9)
    script.reserve(3)
    assert num_queued_tokens(script) == 30
    script.submit(10, num_prompt=6)
    assert script.state(10).phase in (Phase.QUEUED, Phase.RESERVING)


def test_a_predicted_length_stays_with_its_request_and_doubles_when_it_is_exceeded() -> None:
    script = Script()
    script.say(GATEWAY, Submit(request(max_tokens=100), predicted_len=3))
    script.running()
    forecast = script.state().forecast
    assert (forecast.length, forecast.level(script.now)) == (3, 0)
    num_tokens = len(script.state().output)
    while num_tokens < 6:
        script.token()
        num_tokens += 1
        assert forecast.length > num_tokens
    assert (forecast.length, forecast.level(script.now)) == (12, 2)


def test_a_request_that_comes_again_may_have_exceeded_its_prediction_already() -> None:
    script = Script()
    script.say(GATEWAY, Submit(request(max_tokens=100), delivered=[50] * 9, predicted_len=8))
    assert script.state().forecast.length == 16
    script.say(GATEWAY, Submit(request(key=2)))
    assert script.state(2).forecast.length == 0
