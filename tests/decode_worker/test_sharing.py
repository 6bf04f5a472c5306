"""Requests at a decode instance that begin alike: they hold the same blocks, and only the rest is copied."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from alignedserve.instance.config import TransferConfig
from alignedserve.protocol.messages import AnyMessage, Offer, Work
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies import make_policy
from alignedserve.timing.deadlines import Deadlines
from tests.engine.helpers import greedy_params
from tests.island import Entry, Island
from tests.tiny_models import prompts
from tests.worker_parts import engine_of, pool_mover_of

Directory = Callable[[str], Path]
FAMILY, BLOCK = "llama-gqa-tied", 16
# 300 tokens. What they have in common are 12 blocks and a part of the next.
LONG = prompts()[8]
LINES = [LONG[:200] + prompts()[number] for number in (2, 5, 6)]
NUM_COMMON = 200 // BLOCK
# Of an answer: enough that the first one still runs when the last one has arrived.
NUM_TOKENS = 40
# Copies end before the next iteration, however busy the machine is.
QUICK = TransferConfig(quick_bytes=1 << 30)


@pytest.fixture
def island(tiny_model: Directory) -> Iterator[Island]:
    yield Island(tiny_model(FAMILY), enable_prefix_caching=True, transfers=QUICK)


def turn_until(island: Island, is_done: Callable[[], object]) -> None:
    while not is_done():
        assert not island.is_over
        island.turn()


def alone(directory: Path, num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    return Island(directory).run(LINES, [greedy_params(num_tokens)] * len(LINES))


def held(island: Island, entry: Entry) -> list[int]:
    return [*island.decode.schedule.blocks[entry.key].blocks]


def num_loaded(island: Island) -> int:
    """In blocks."""
    moved = [each for report in island.reports for each in report.moved if each.what == "load"]
    return sum(each.num_bytes for each in moved) // engine_of(island.decode).format.block_bytes


def columns(entry: Entry) -> int:
    return -(-len(entry.request.prompt) // BLOCK)


def run_first(island: Island, num_tokens: int = NUM_TOKENS) -> list[Entry]:
    """The first one runs when the others come."""
    entries = [island.submit(LINES[0], greedy_params(num_tokens))]
    turn_until(island, lambda: entries[0].place == "running")
    return entries + [island.submit(line, greedy_params(num_tokens)) for line in LINES[1:]]


def test_lines_with_common_instructions_hold_them_once(island: Island, tiny_model: Directory) -> None:
    entries = run_first(island)
    turn_until(island, lambda: all(entry.place == "running" for entry in entries))
    first, *others = (held(island, entry) for entry in entries)
    for blocks in others:
        assert blocks[:NUM_COMMON] == first[:NUM_COMMON] and not {*blocks[NUM_COMMON:]} & {*first}
    num_all = sum(len(blocks) for blocks in (first, *others))
    memory = island.decode.memory
    assert memory.num_blocks - memory.num_free == num_all - 2 * NUM_COMMON
    island.decode.check()
    assert num_loaded(island) == sum(map(columns, entries)) - 2 * NUM_COMMON
    num_arriving = sum(report.num_arriving for report in island.reports)
    assert num_arriving == sum(len(entry.request.prompt) for entry in entries)
    assert sum(report.num_not_copied for report in island.reports) == 2 * NUM_COMMON * BLOCK
    island.finish()
    assert [entry.output for entry in entries] == alone(tiny_model(FAMILY))


def test_without_it_each_has_its_own(tiny_model: Directory) -> None:
    island = Island(tiny_model(FAMILY), transfers=QUICK)
    entries = run_first(island)
    turn_until(island, lambda: all(entry.place == "running" for entry in entries))
    blocks = [block for entry in entries for block in held(island, entry)]
    assert len({*blocks}) == len(blocks)
    assert num_loaded(island) == sum(map(columns, entries))
    island.finish()


def test_what_is_read_is_what_others_brought_and_never_what_they_go_on_with(
    island: Island, tiny_model: Directory
) -> None:
    """A block with room for more tokens is its request's own, even if the same tokens are in another one."""
    line, params = LINES[0], greedy_params(NUM_TOKENS)
    entries = [island.submit(line, params)]
    turn_until(island, lambda: entries[0].place == "running")
    entries.append(island.submit(line, params))
    turn_until(island, lambda: entries[1].place == "running")
    first, second = (held(island, entry) for entry in entries)
    num_full = len(line) // BLOCK
    assert first[:num_full] == second[:num_full] and first[num_full] != second[num_full]
    island.finish()
    assert [entry.output for entry in entries] == [alone(tiny_model(FAMILY))[0]] * 2


def test_where_all_is_here_nothing_is_copied(island: Island, tiny_model: Directory) -> None:
    """The prompt ends with a block, so a request like an earlier one needs no KV but that of its own tokens."""
    prompt, params = LONG[: 13 * BLOCK], greedy_params(NUM_TOKENS)
    entries = [island.submit(prompt, params)]
    turn_until(island, lambda: entries[0].place == "running")
    before = num_loaded(island)
    entries.append(island.submit(prompt, params))
    island.finish()
    assert before == num_loaded(island) == 13
    assert [entry.output for entry in entries] == 2 * Island(tiny_model(FAMILY)).run([prompt], [params])


def test_one_is_evicted_and_the_others_keep_what_it_shares(island: Island, tiny_model: Directory) -> None:
    entries = run_first(island)
    turn_until(island, lambda: all(entry.place == "running" for entry in entries))
    before, num_loaded_before = held(island, entries[1]), num_loaded(island)
    island.evict(entries[0])
    turn_until(island, lambda: entries[0].place != "evicting")
    turn_until(island, lambda: entries[0].place == "running")
    # It finds the blocks of the others again, and its own, if their room was not needed.
    assert held(island, entries[0])[:NUM_COMMON] == before[:NUM_COMMON]
    assert num_loaded(island) - num_loaded_before <= 1
    island.finish()
    assert island.num_evicted == 1
    assert [entry.output for entry in entries] == alone(tiny_model(FAMILY))


def test_aborted_under_a_copy_it_leaves_what_it_shares(island: Island, tiny_model: Directory) -> None:
    entries = run_first(island)
    turn_until(island, lambda: entries[1].place == "decode")
    assert entries[1].key in island.decode.schedule.blocks.pulling
    island.abort(entries[1])
    island.decode.check()
    turn_until(island, lambda: entries[1].place == "over")
    island.decode.check()
    island.finish()
    expected = alone(tiny_model(FAMILY))
    assert (entries[0].output, entries[2].output) == (expected[0], expected[2])


def test_what_did_not_arrive_is_shared_with_nobody(island: Island, tiny_model: Directory) -> None:
    entries = run_first(island)
    mover = pool_mover_of(island.decode)
    clock, mover._clock = mover._clock, lambda: math.inf  # every deadline has passed
    turn_until(island, lambda: len(island.failures) >= 2)
    mover._clock = clock
    island.finish()
    assert [entry.output for entry in entries] == alone(tiny_model(FAMILY))


def test_the_next_turn_finds_the_answer(island: Island) -> None:
    first = island.submit(LINES[0], greedy_params(40))
    turn_until(island, lambda: first.place == "over")
    second = island.submit(LINES[0] + first.output, greedy_params(4))
    before = num_loaded(island)
    turn_until(island, lambda: second.place == "over")
    # The last token's KV was never computed.
    num_there = (len(LINES[0]) + 40 - 1) // BLOCK
    assert num_loaded(island) - before == columns(second) - num_there
    island.finish()


@pytest.mark.parametrize("salts", [("", "b"), ("a", "b")])
def test_with_another_salt_nothing_is_shared(island: Island, salts: tuple[str, str]) -> None:
    entries = [island.submit(LINES[0], greedy_params(20)) for _ in salts]
    for entry, salt in zip(entries, salts, strict=True):
        entry.request.cache_salt = salt
    turn_until(island, lambda: all(entry.place == "running" for entry in entries))
    first, second = (held(island, entry) for entry in entries)
    assert not {*first} & {*second}
    island.finish()


@pytest.mark.parametrize("family", ["mistral-window", "gemma3", "gpt-oss"])
def test_with_windows_and_groups_tokens_are_the_same(tiny_model: Directory, family: str) -> None:
    def evict(island: Island) -> None:
        for entry in island.in_place("running"):
            if (island.num_turns + entry.key) % 7 == 0:
                island.evict(entry)

    island = Island(tiny_model(family), enable_prefix_caching=True, meddle=evict)
    said = island.run([*LINES, *LINES], [greedy_params(NUM_TOKENS)] * 6)
    assert island.num_evicted
    assert said == 2 * alone(tiny_model(family))
    island.decode.check()


def test_in_little_memory_all_get_their_tokens(tiny_model: Directory) -> None:
    """Each needs 16 to 18 blocks, and there are 26."""
    directory = tiny_model(FAMILY)
    expected = alone(directory)
    block_bytes = engine_of(Island(directory).decode).format.block_bytes
    for name in ("aligned", "fcfs", "apt", "bros", "alise"):
        island = Island(
            directory,
            enable_prefix_caching=True,
            decode={"kv_cache_memory_bytes": 26 * block_bytes, "max_model_len": 400},
            policy=make_policy(SchedulingConfig(name)),
        )
        assert island.run([*LINES, *LINES], [greedy_params(NUM_TOKENS)] * 6) == expected * 2
        assert any(report.num_running > 1 for report in island.reports)


@pytest.mark.parametrize("is_rt", [False, True], ids=["best effort", "real time"])
def test_of_lines_that_come_together_one_brings_what_they_have_in_common(
    island: Island, tiny_model: Directory, is_rt: bool
) -> None:
    """And the others wait for it, but for nothing else. Real time does not wait."""
    other = prompts()[7]
    entries = [island.submit(prompt, greedy_params(NUM_TOKENS)) for prompt in (*LINES, other)]
    to_decode, held_back = island.to_decode, list[Work]()

    def offer_together(message: AnyMessage) -> None:
        if not isinstance(message, Offer):
            to_decode(message)
            return
        held_back.extend(replace(work, deadlines=Deadlines(is_rt=is_rt)) for work in message.works)
        if len(held_back) == len(entries):
            to_decode(Offer(held_back, is_batch=True))

    island.to_decode = offer_together
    turn_until(island, lambda: island.decode._requests)
    bringing = entries if is_rt else [entries[0], entries[3]]
    assert island.decode._requests.keys() == {entry.key for entry in bringing}
    turn_until(island, lambda: all(entry.place == "running" for entry in entries))
    assert num_loaded(island) == sum(map(columns, entries)) - (0 if is_rt else 2 * NUM_COMMON)
    island.finish()
    assert [entry.output for entry in entries[:3]] == alone(tiny_model(FAMILY))
