"""A prefill instance's reports, and what is left of requests that end early."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from alignedserve.protocol.messages import Abort, Failed, Gone, Offer, Prefill, PrefillReport
from alignedserve.types import RequestKey
from tests.engine.helpers import greedy_params
from tests.prefill_worker.rig import BLOCK, KEY, Rig, work
from tests.tiny_models import greedy, prompts
from tests.worker_parts import engine_of, pool_mover_of

Directory = Callable[[str], Path]
FAMILY = "llama-gqa-tied"
LONG = prompts()[8]


@pytest.fixture
def rig(tiny_model: Directory) -> Rig:
    return Rig(tiny_model(FAMILY))


def test_a_prompt_is_reported_as_it_goes(rig: Rig, tiny_model: Directory) -> None:
    rig.worker.on(Prefill([work(LONG)]))
    rig.step_until(lambda: rig.reports and rig.reports[-1].saved)
    progress = [each for report in rig.reports for each in report.progress]
    assert progress == [(KEY, num, 0) for num in (40, 80, 120, 160, 200, 240, 280)]
    (news,) = [each for report in rig.reports for each in report.news]
    assert (news.key, news.first, news.tokens) == (KEY, 0, greedy(tiny_model(FAMILY))[8][:1])
    assert rig.reports[-1].saved == [(KEY, 300)]
    assert rig.reports[-1].num_free_blocks == rig.worker.engine.limits.num_blocks
    assert rig.pool[: 300 // BLOCK].any(axis=1).all() and not rig.pool[300 // BLOCK + 1 :].any()
    rig.check_idle()


def test_what_was_copied_is_reported_once(rig: Rig) -> None:
    rig.worker.on(Prefill([work(LONG)]))
    rig.step_until(lambda: rig.reports and rig.reports[-1].saved)
    moved = [each for report in rig.reports for each in report.moved]
    block_bytes = engine_of(rig.worker).cache.format.block_bytes
    assert {each.what for each in moved} == {"save"}
    assert sum(each.num_bytes for each in moved) == -(-300 // BLOCK) * block_bytes
    assert all(each.seconds > 0 for each in moved)
    assert rig.worker.limits.block_bytes == block_bytes
    rig.check_idle()


def test_what_was_computed_is_reported_once(rig: Rig) -> None:
    rig.worker.on(Prefill([work(LONG)]))
    rig.step_until(lambda: any(report.saved for report in rig.reports))
    assert sum(report.num_computed for report in rig.reports) == len(LONG)


def test_complete_blocks_are_saved_before_the_rest_is_computed(rig: Rig) -> None:
    rig.worker.on(Prefill([work(LONG)]))
    rig.step()
    deadline_s = time.monotonic() + 60
    while not rig.pool[1].any():
        assert time.monotonic() < deadline_s
    assert not rig.pool[2:].any(), "of 40 tokens, 32 fill their blocks"
    rig.worker.on(Abort([KEY]))
    rig.step_until(lambda: rig.is_gone)
    rig.check_idle()


def test_a_request_that_ends_with_its_first_token_is_not_kept(rig: Rig) -> None:
    rig.worker.on(Prefill([work(LONG, greedy_params(max_tokens=1))]))
    rig.step_until(lambda: engine_of(rig.worker).num_unfinished == 0 and rig.reports)
    (news,) = [each for report in rig.reports for each in report.news]
    assert news.finish_reason == "length"
    assert not any(report.saved for report in rig.reports)
    rig.worker.on(Abort([KEY]))
    rig.step()
    assert rig.said[-1] == Gone([KEY])
    rig.check_idle()


@pytest.mark.parametrize("num_steps", range(12))
@pytest.mark.parametrize("num_cached", [0, 150])
def test_abort_at_any_time_is_answered_once(rig: Rig, num_steps: int, num_cached: int) -> None:
    rig.worker.on(Prefill([work(LONG, num_cached=num_cached)]))
    for _ in range(num_steps):
        rig.step()
    rig.worker.on(Abort([KEY]))
    rig.step_until(lambda: rig.is_gone)
    rig.step()
    assert rig.said.count(Gone([KEY])) == 1
    assert rig.said[-1] == Gone([KEY]) or rig.reports[-1] is rig.said[-1]
    rig.check_idle()


def test_a_bad_request_is_its_own_affair(rig: Rig) -> None:
    bad, good = work([10_000]), work(prompts()[3], key=RequestKey(8))
    rig.worker.on(Prefill([bad, good]))
    rig.step_until(lambda: any(report.saved for report in rig.reports))
    news = {each.key: each for report in rig.reports for each in report.news}
    assert news[KEY].finish_reason == "error" and "token id 10000" in (news[KEY].error or "")
    assert news[RequestKey(8)].finish_reason is None
    rig.check_idle()


@pytest.mark.parametrize("what", ["load", "save"])
def test_a_copy_that_fails_is_reported_and_the_request_let_go(rig: Rig, what: str) -> None:
    pool_mover_of(rig.worker)._clock = lambda: math.inf  # every deadline has passed
    rig.worker.on(Prefill([work(LONG, num_cached=150 if what == "load" else 0)]))
    rig.step_until(lambda: any(isinstance(message, Failed) for message in rig.said))
    (failed,) = [message for message in rig.said if isinstance(message, Failed)]
    assert failed == Failed(KEY, what, "its deadline passed")
    assert not any(report.saved for report in rig.reports)
    rig.check_idle()


def test_what_was_saved_is_reported_before_the_next_iteration_begins(rig: Rig) -> None:
    """A decode instance waits for it: it should not wait for another prompt to be computed."""
    rig.worker.on(Prefill([work(LONG)]))
    rig.step_until(lambda: rig.news)
    rig.worker.on(Prefill([work(LONG, key=RequestKey(8))]))
    deadline_s = time.monotonic() + 60
    while not any(report.saved for report in rig.reports):
        assert time.monotonic() < deadline_s
        rig.said += rig.worker.take_outcomes()
    assert len(rig.news) == 1, "the other prompt has not been computed"
    rig.step_until(lambda: len(rig.news) == 2 and rig.reports[-1].saved)
    rig.check_idle()


def test_a_new_pool_voids_what_was_ordered_before(rig: Rig) -> None:
    rig.worker.on(Prefill([work(LONG), work(LONG, key=RequestKey(8), num_cached=150)]))
    rig.step()
    num_said = len(rig.said)
    pool = np.zeros_like(rig.pool)
    rig.worker.use_pool(pool)
    assert engine_of(rig.worker).num_unfinished == 0
    rig.step()
    assert all(isinstance(message, PrefillReport) and not message.news for message in rig.said[num_said:])
    rig.worker.on(Prefill([work(LONG)]))
    rig.step_until(lambda: rig.reports[-1].saved)
    assert pool[0].any()
    rig.check_idle()


def test_a_dead_routers_orders_are_dropped_without_a_word(rig: Rig) -> None:
    rig.worker.on(Prefill([work(LONG), work(LONG, key=RequestKey(8))]))
    rig.step()
    rig.worker.on(Abort([RequestKey(8)]))
    rig.worker.drop_all()
    num_said = len(rig.said)
    rig.step()
    assert not any(isinstance(message, Gone) for message in rig.said)
    assert not any(report.news or report.progress for report in rig.said[num_said:])  # type: ignore[union-attr]
    rig.check_idle()


def test_others_orders_are_refused(rig: Rig) -> None:
    with pytest.raises(RuntimeError, match="Offer: no order for a prefill instance"):
        rig.worker.on(Offer([], is_batch=False))
    rig.worker.leave_pool()
    rig.worker.on(Prefill([work(LONG, num_cached=16)]))
    with pytest.raises(RuntimeError, match="came before UsePool"):
        rig.step()
    engine_of(rig.worker).reset()
