"""A complete answer at a decode instance: it holds its blocks until they are saved or it is told to forget them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from alignedserve.decode_worker import worker
from alignedserve.protocol.messages import Commit, DecodeReport, Evict, Release, Reserve, Reserved
from alignedserve.types import RequestKey
from tests.engine.helpers import greedy_params
from tests.island import Entry, Island
from tests.tiny_models import prompts
from tests.worker_parts import engine_of, pool_mover_of

Directory = Callable[[str], Path]
FAMILY, BLOCK = "llama-gqa-tied", 16
NUM_TOKENS = 40
PROMPT = prompts()[2]


class Keeping(Island):
    """Orders an answer that has ended to be saved, as far as its full blocks go."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, enable_prefix_caching=True, **options)
        self.held: list[RequestKey] = []
        self.saves = True

    def say(self, prompt: list[int] = PROMPT, num_tokens: int = NUM_TOKENS) -> Entry:
        entry = self.submit(prompt, greedy_params(num_tokens))
        entry.request = replace(entry.request, has_next_turn=True)
        return entry

    def save(self, entry: Entry, num_saved: int = 0) -> None:
        size = (entry.num_tokens - 1) // BLOCK * BLOCK
        (reserved,) = self.pool.on(Reserve(entry.key, size), now=0.0)
        assert isinstance(reserved, Reserved) and reserved.blocks
        self.to_decode(Evict(entry.key, reserved.blocks[: size // BLOCK], num_saved))

    def _decode_report(self, report: DecodeReport) -> None:
        self.held += report.ended
        super()._decode_report(report)

    def _recall(self, entry: Entry) -> None:
        if entry.key in self.held and self.saves:
            entry.place = "saving"
            self.save(entry)
        else:
            super()._recall(entry)

    def _saved(self, entry: Entry, num_tokens: int) -> None:
        if entry.place != "saving":
            super()._saved(entry, num_tokens)
            return
        entry.num_cached, entry.place = num_tokens, "over"
        self.pool.on(Commit(entry.key, num_tokens, due_s=0.0), now=0.0)
        self.pool.on(Release([entry.key]), now=0.0)

    def _left(self, entry: Entry) -> None:
        if entry.place == "saving":
            entry.place = "leaving"
        super()._left(entry)


@pytest.fixture
def island(tiny_model: Directory) -> Iterator[Keeping]:
    yield Keeping(tiny_model(FAMILY))


def turn_until(island: Island, is_done: Callable[[], object]) -> None:
    while not is_done():
        island.turn()


def test_its_full_blocks_are_saved_and_then_it_is_gone(island: Keeping, tiny_model: Directory) -> None:
    entry = island.say()
    island.finish()
    assert island.held == [entry.key]
    assert entry.num_cached == (len(PROMPT) + NUM_TOKENS - 1) // BLOCK * BLOCK
    assert entry.output == Island(tiny_model(FAMILY)).run([PROMPT], [greedy_params(NUM_TOKENS)])[0]


def test_its_blocks_are_held_until_an_order_comes(island: Keeping) -> None:
    entry = island.say()
    island._recall = lambda entry: None  # type: ignore[method-assign]
    turn_until(island, lambda: island.held)
    num_held = island.decode.memory.num_blocks - island.decode.memory.num_free
    assert num_held == -(-(len(PROMPT) + NUM_TOKENS - 1) // BLOCK)
    island.decode.check()
    Island._recall(island, entry)
    island.finish()
    assert not any(report.evicted for report in island.reports)


@pytest.mark.parametrize(("has_next_turn", "num_tokens"), [(False, NUM_TOKENS), (True, 2)])
def test_what_has_no_next_turn_or_fills_no_block_is_gone_at_once(
    island: Keeping, has_next_turn: bool, num_tokens: int
) -> None:
    prompt = PROMPT[: len(PROMPT) // BLOCK * BLOCK + 3] if len(PROMPT) > BLOCK else PROMPT
    entry = island.say(prompt, num_tokens)
    entry.request = replace(entry.request, has_next_turn=has_next_turn)
    island.finish()
    assert not island.held


def test_a_copy_that_fails_leaves_nothing(island: Keeping) -> None:
    entry = island.say()
    turn_until(island, lambda: entry.place == "running")
    mover = pool_mover_of(island.decode)
    clock, mover._clock = mover._clock, lambda: math.inf
    turn_until(island, lambda: entry.place == "over")
    mover._clock = clock
    island.finish()
    assert island.held and not island.failures and not any(report.evicted for report in island.reports)


@pytest.mark.parametrize("is_saving", [False, True])
def test_a_new_pool_lets_it_go(island: Keeping, is_saving: bool) -> None:
    entry = island.say()
    island._recall = lambda entry: None  # type: ignore[method-assign]
    turn_until(island, lambda: island.held)
    if is_saving:
        island.save(entry)
    entry.place = "saving"
    island.memory = np.zeros_like(island.memory)
    for each in island.workers:
        each.use_pool(island.memory)
    island.finish()
    assert island.decode.memory.num_free == island.decode.memory.num_blocks


def test_an_abort_while_it_is_saved_ends_it_after_the_copy(island: Keeping) -> None:
    entry = island.say()
    island._recall = lambda entry: None  # type: ignore[method-assign]
    turn_until(island, lambda: island.held)
    island.save(entry)
    Island._recall(island, entry)
    island.finish()
    assert not any(report.evicted for report in island.reports)


def test_without_an_order_it_makes_room_for_others(
    tiny_model: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a router or a pool that stands still takes no memory from others."""
    monkeypatch.setattr(worker, "HOLD_S", -1.0)
    island = Keeping(tiny_model(FAMILY))
    entry = island.say()
    island._recall = lambda entry: setattr(entry, "place", "leaving")  # type: ignore[method-assign]
    turn_until(island, lambda: island.held)
    memory = island.decode.memory
    for _ in range(3):
        island.decode.step()
    assert memory.num_free < memory.num_blocks, "nothing else needs them"
    monkeypatch.setattr(island.decode.schedule.blocks, "needed", lambda *request: memory.num_blocks)
    other = island.submit(PROMPT, greedy_params(4))
    turn_until(island, lambda: entry.place == "over")
    monkeypatch.undo()
    island._recall = lambda entry: Island._recall(island, entry)  # type: ignore[method-assign]
    turn_until(island, lambda: other.is_finished)
    assert not any(report.evicted for report in island.reports)


def test_a_dead_router_leaves_nothing(island: Keeping) -> None:
    entry = island.say()
    island._recall = lambda entry: None  # type: ignore[method-assign]
    turn_until(island, lambda: island.held)
    for each in island.workers:
        each.drop_all()
        engine_of(each).check_idle()
    entry.place = "over"
    island.pool.on(Release([entry.key]), now=0.0)
    island.finish()


@pytest.mark.parametrize("num_saved", [64, 32])
@pytest.mark.parametrize("family", ["mistral-window", "ministral"])
def test_with_a_window_it_is_saved_only_if_the_pool_has_all_that_it_has_passed(
    tiny_model: Directory, family: str, num_saved: int
) -> None:
    """With 109 tokens it has passed the first 64. The pool had these when the prompt was saved, and may not have them
    any more."""
    island = Keeping(tiny_model(family))
    save = island.save
    island.save = lambda entry: save(entry, num_saved)  # type: ignore[method-assign,misc,assignment]
    entry = island.say(prompts()[8][:70])
    island.finish()
    assert island.held == [entry.key] and entry.place == "over"
    evicted = [each for report in island.reports for each in report.evicted]
    assert evicted == ([(entry.key, 96)] if num_saved == 64 else [])


@pytest.mark.parametrize(("num_prompt", "is_held"), [(70, True), (60, False)])
def test_with_a_window_it_is_not_held_if_the_prompt_was_passed_and_more(
    tiny_model: Directory, num_prompt: int, is_held: bool
) -> None:
    island = Keeping(tiny_model("mistral-window"))
    island.save = lambda entry: Keeping.save(island, entry, 64)  # type: ignore[method-assign,misc,assignment]
    island.say(prompts()[8][:num_prompt], 40)
    island.finish()
    assert bool(island.held) == is_held
