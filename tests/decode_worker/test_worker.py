"""A decode instance's reports, and what is left of requests that end early."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from unittest.mock import ANY

import numpy as np
import pytest
from msgspec.structs import replace

from alignedserve.instance.worker import Step
from alignedserve.protocol.messages import AnyMessage, DecodeReport, Evict, Failed, Prefill
from alignedserve.types import PoolBlockId, RequestKey
from tests.engine.helpers import greedy_params
from tests.island import Entry, Island
from tests.tiny_models import greedy, prompts
from tests.worker_parts import engine_of, pool_mover_of

Directory = Callable[[str], Path]
FAMILY = "llama-gqa-tied"


@pytest.fixture
def island(tiny_model: Directory) -> Island:
    return Island(tiny_model(FAMILY))


def submit_all(island: Island) -> list[Entry]:
    return [island.submit(prompt, greedy_params()) for prompt in prompts()]


def turn_until(island: Island, is_done: Callable[[], object]) -> None:
    while not is_done():
        assert not island.is_over
        island.turn()


def check_tokens(entries: list[Entry], directory: Path) -> None:
    """Aborted ones have some of theirs, the others all."""
    for entry, tokens in zip(entries, greedy(directory), strict=True):
        assert entry.output == tokens[: len(entry.output)]
        assert entry.is_aborted or len(entry.output) == len(tokens)


@pytest.mark.parametrize("every", [1, 2, 5])
def test_aborts_at_any_time_leave_nothing_and_harm_nobody(
    island: Island, tiny_model: Directory, every: int
) -> None:
    def meddle(island: Island) -> None:
        for entry in island.in_place("running")[:2]:
            if (island.num_turns + entry.key) % 5 == 0:
                island.evict(entry)
        places = ("prefill", "decode", "running", "evicting")
        aborted = next((entry for entry in entries[::2] if entry.place in places), None)
        if aborted and island.num_turns % every == 0:
            aborted_in.append(aborted.place)
            island.abort(aborted)

    entries, aborted_in = submit_all(island), list[str]()
    island.meddle = meddle
    island.finish()
    check_tokens(entries, tiny_model(FAMILY))
    assert len(aborted_in) == len(entries[::2])


def test_abort_while_kv_is_on_its_way_to_the_instance(island: Island) -> None:
    entry = island.submit(prompts()[8], greedy_params())
    turn_until(island, lambda: entry.place == "decode")
    assert len(island.decode.schedule.candidates) == 0, (
        "its pull has started, and is picked up in the next turn"
    )
    island.abort(entry)
    island.finish()
    assert not any(report.admitted for report in island.reports)


def test_abort_while_kv_is_on_its_way_back(island: Island) -> None:
    entry = island.submit(prompts()[8], greedy_params())
    turn_until(island, lambda: entry.place == "running")
    island.evict(entry)
    island.abort(entry)
    island.finish()
    assert not any(report.evicted for report in island.reports)


def test_a_pull_that_fails_is_reported_and_the_request_recovers(
    island: Island, tiny_model: Directory
) -> None:
    entries = submit_all(island)
    mover = pool_mover_of(island.decode)
    clock, mover._clock = mover._clock, lambda: math.inf  # every deadline has passed
    turn_until(island, lambda: island.failures)
    mover._clock = clock
    island.finish()
    check_tokens(entries, tiny_model(FAMILY))
    assert {(failed.what, failed.reason) for failed in island.failures} == {("pull", "its deadline passed")}


def test_an_eviction_that_fails_leaves_the_request_running(island: Island, tiny_model: Directory) -> None:
    entries = submit_all(island)
    victim = entries[4]
    turn_until(island, lambda: victim.place == "running")
    mover = pool_mover_of(island.decode)
    clock, mover._clock = mover._clock, lambda: math.inf
    failed, said = Failed(victim.key, "evict", "its deadline passed"), []
    take_messages = island.decode._take_messages

    def noted(step: Step, duration_s: float) -> list[AnyMessage]:
        said.append(take_messages(step, duration_s))
        return said[-1]

    island.decode._take_messages = noted  # type: ignore[method-assign]
    island.evict(victim)
    turn_until(island, lambda: failed in island.failures)
    assert victim.place == "running"
    # the report may want the same request evicted again: a router that still waits for its KV would not listen
    (messages,) = [each for each in said if failed in each]
    assert messages[0] == failed and isinstance(messages[1], DecodeReport)
    mover._clock = clock
    island.finish()
    check_tokens(entries, tiny_model(FAMILY))


def test_a_new_pool_voids_candidates_and_leaves_the_running_alone(
    island: Island, tiny_model: Directory
) -> None:
    entries = submit_all(island)
    turn_until(island, lambda: island.in_place("running"))
    island.memory = np.zeros_like(island.memory)
    for worker in island.workers:
        worker.use_pool(island.memory)
    for entry in entries:
        entry.num_cached = 0
        if entry.place in ("prefill", "pooled", "decode"):
            entry.place = "queued"
    island.meddle = lambda island: None
    island.finish()
    check_tokens(entries, tiny_model(FAMILY))


def test_a_dead_routers_orders_are_dropped_and_the_next_one_is_served(
    island: Island, tiny_model: Directory
) -> None:
    entries = submit_all(island)
    turn_until(island, lambda: island.in_place("running"))
    island.evict(island.in_place("running")[0])
    for worker in island.workers:
        worker.drop_all()
        engine_of(worker).check_idle()
    for entry in entries:
        entry.place = "over" if entry.is_finished else "queued"
        entry.num_cached = 0
    island.finish()
    check_tokens(entries, tiny_model(FAMILY))


def test_what_changes_between_iterations_is_reported_once(island: Island) -> None:
    decode = island.decode
    messages, goes_on = decode.step()
    (report,) = messages
    assert isinstance(report, DecodeReport) and not goes_on
    assert (report.num_running, report.num_free_blocks) == (0, decode.engine.limits.num_blocks)
    assert decode.step() == ([], False), "nothing is new"
    decode.on(Evict(RequestKey(5), [], 0))
    assert decode.step() == ([], False), "it had ended"
    island.close()


def test_after_an_eviction_that_failed_at_once_what_is_wanted_is_reported_again(island: Island) -> None:
    decode = island.decode
    ((report,), _) = decode.step()
    failed = Failed(RequestKey(5), "evict", "its deadline passed")
    decode._failed_evictions.append(failed)
    assert decode.step() == ([failed, replace(report, duration_s=ANY)], False)
    island.close()


def test_reports_say_what_runs(island: Island) -> None:
    first, second = (
        island.submit(prompts()[2], greedy_params()),
        island.submit(prompts()[5], greedy_params(8)),
    )
    island.finish()
    assert [key for report in island.reports for key in report.admitted] == [first.key, second.key]
    # the second may have come in the middle of the iteration that is reported first
    both = [report for report in island.reports if report.num_running == 2][1:]
    assert both and len({report.max_length - report.min_length for report in both}) == 1
    assert all(report.sum_lengths == report.max_length + report.min_length for report in both)
    assert island.reports[-1].num_running == 0
    assert all(report.duration_s > 0 for report in island.reports)


def test_reports_say_how_long_those_of_a_batch_are(island: Island, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [island.submit(prompts()[number], greedy_params(40)) for number in (1, 2, 5)]
    schedule = island.decode.schedule
    turn_until(island, lambda: len(schedule.blocks.running) == len(entries))
    running = [*schedule.blocks.running.values()]
    for request in running:
        request.batch = 7 if request.key != entries[0].key else 6
    lengths = [request.num_tokens for request in running if request.batch == 7]
    with monkeypatch.context() as patch:
        patch.setattr(schedule.candidates, "running_batch", 7)
        (messages, _) = island.decode.step()
    for message in messages:
        island.received(message)
    (report,) = [each for each in messages if isinstance(each, DecodeReport)]
    assert report.batch == 7
    assert report.batch_min_length in (min(lengths), min(lengths) + 1)
    assert report.batch_max_length - report.batch_min_length == max(lengths) - min(lengths) > 0
    island.finish()


def test_others_orders_are_refused(island: Island) -> None:
    with pytest.raises(RuntimeError, match="Prefill: no order for a decode instance"):
        island.decode.on(Prefill([]))
    island.close()


def test_an_eviction_without_enough_blocks_is_refused(island: Island) -> None:
    entry = island.submit(prompts()[6], greedy_params())
    turn_until(island, lambda: entry.place == "running" and len(entry.output) > 20)
    entry.place = "evicting"
    island.decode.on(Evict(entry.key, [PoolBlockId(block) for block in range(4)], entry.num_cached))
    island.turn()
    reason = "6 blocks hold its KV by now, and 4 are reserved"
    assert island.failures == [Failed(entry.key, "evict", reason)]
    island.finish()
    assert len(entry.output) == 64


def test_what_was_copied_is_reported(island: Island) -> None:
    entry = island.submit(prompts()[2], greedy_params())
    island.finish()
    moved = [each for report in island.reports for each in report.moved]
    form = engine_of(island.decode).cache.format
    num_blocks = form.num_columns(len(entry.request.prompt))
    assert [(each.what, each.num_bytes) for each in moved] == [("load", num_blocks * form.block_bytes)]


def test_what_was_computed_is_reported_once(island: Island) -> None:
    entries = [island.submit(prompts()[number], greedy_params()) for number in (2, 5)]
    island.finish()
    # the first token is the prefill instance's, and the last one's KV is nobody's
    assert sum(report.num_computed for report in island.reports) == sum(
        len(entry.output) - 1 for entry in entries
    )
