"""Chats of several turns in virtual time: a turn computes what is new in it, whatever ran the one before."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from alignedserve.protocol.messages import DecodeReport, Request
from alignedserve.router.events import Event, Received, Send
from alignedserve.sim.island import SimIsland
from alignedserve.sim.model import VOCABULARY, make_request, sample
from alignedserve.types import RequestKey
from tests.sim.islands import BLOCK_SIZE, every_policy, limits, play, small_island

NUM_OUTPUT = 50
NUM_NEW = 30
# Seconds from turn to turn, which are enough for each.
TURN_S = 20.0


def chat(number: int, num_turns: int = 4, tier: str = "rt", has_next_turn: bool = True) -> list[Request]:
    dice, said, turns = Random(number), list[int](), list[Request]()
    for turn in range(num_turns):
        said += [dice.randrange(VOCABULARY) for _ in range(NUM_NEW)]
        key = 100 * number + turn
        asked = make_request(key, len(said), NUM_OUTPUT, number + TURN_S * turn, prompt=[*said], tier=tier)
        turns.append(replace(asked, has_next_turn=has_next_turn))
        said += [sample(asked.seed, index) for index in range(NUM_OUTPUT)]
    return turns


def island_of(policy: str = "aligned", **options: Any) -> SimIsland:
    return small_island(policy, enable_prefix_caching=True, num_prefill=2, num_decode=2, **options)


def colocated_of(policy: str = "aligned", num: int = 2, **options: Any) -> SimIsland:
    return small_island(policy, enable_prefix_caching=True, num_colocated=num, **options)


def num_computed(island: SimIsland) -> dict[int, int]:
    return {int(key): count for key, count in island.world.computed.items()}


def in_order(chats: list[list[Request]]) -> list[Request]:
    return sorted((turn for turns in chats for turn in turns), key=lambda each: each.arrival_s)


def check_only_new_tokens(island: SimIsland, chats: list[list[Request]]) -> None:
    """All prompts and answers are computed, and of what was said before at most one block."""
    computed = num_computed(island)
    for turns in chats:
        before = 0
        for turn in turns:
            count = computed[turn.key] - (len(turn.prompt) - before + NUM_OUTPUT - 1)
            # A turn's last token is computed when the next one reads it.
            assert 0 <= count <= (BLOCK_SIZE if before else 0), turn.key
            before = len(turn.prompt) + NUM_OUTPUT


@every_policy
@pytest.mark.parametrize("link", ["host", "nccl"])
def test_a_turn_computes_what_is_new_in_it(policy: str, link: str) -> None:
    chats = [chat(number) for number in range(1, 4)]
    island = play(island_of(policy, link=link), in_order(chats))
    check_only_new_tokens(island, chats)


# One group attends to all tokens, and two to the latest hundred.
GROUPS = {"window": 100, "num_full_groups": 1, "num_sliding_groups": 2}


@pytest.mark.parametrize("groups", [{}, {"window": 100}, GROUPS], ids=["all", "window", "groups"])
def test_also_after_the_instances_that_had_it_are_gone(groups: dict[str, int]) -> None:
    chats = [chat(number) for number in range(1, 4)]
    large = replace(limits(192), **groups)
    island = island_of(prefill=large, decode=large)
    for process in (*island.prefills, *island.decodes):
        for turn in range(4):
            island.world.clock.at(TURN_S * turn + 15.0, process.kill)
            island.world.clock.at(TURN_S * turn + 16.0, process.start)
    play(island, in_order(chats))
    check_only_new_tokens(island, chats)


@every_policy
def test_also_at_colocated_instances_that_lose_what_they_have(policy: str) -> None:
    chats = [chat(number) for number in range(1, 4)]
    island = colocated_of(policy)
    lose_between_turns(island)
    play(island, in_order(chats))
    check_only_new_tokens(island, chats)


def test_also_after_a_new_router(policy: str = "aligned") -> None:
    chats = [chat(number) for number in range(1, 4)]
    island = colocated_of(policy)
    lose_between_turns(island)
    for turn in range(4):
        island.world.clock.at(TURN_S * turn + 17.0, island.router.kill)
        island.world.clock.at(TURN_S * turn + 17.5, island.router.start)
    play(island, in_order(chats))
    check_only_new_tokens(island, chats)


def test_a_colocated_instance_loads_nothing_that_it_has_itself() -> None:
    chats = [chat(number) for number in range(1, 4)]
    island = play(colocated_of(num=1), in_order(chats))
    check_only_new_tokens(island, chats)
    core = island.router.core
    assert core and not core.state.counters.of(island.colocated[0].instance_id).num_arriving_tokens


@every_policy
@pytest.mark.parametrize("tier", ["rt", "be"])
def test_what_the_pool_lacks_of_a_common_prefix_is_computed_once(policy: str, tier: str) -> None:
    (first,) = chat(1, num_turns=1)
    dice = Random(2)
    # The pool has 64 tokens of it, and 192 more are new to all.
    said = [sample(first.seed, index) for index in range(NUM_OUTPUT)]
    common = [*first.prompt, *said][:64] + [dice.randrange(VOCABULARY) for _ in range(192)]
    others = [
        make_request(10 + number, 260, 8, 20.0, prompt=[*common, *[number] * 4], tier=tier)
        for number in range(6)
    ]
    island = colocated_of(policy, num=1)
    lose_between_turns(island)
    play(island, [first, *others])
    num_own = 4 + 8 - 1
    computed = num_computed(island)
    assert sum(computed[each.key] for each in others) == 192 + len(others) * num_own


def test_a_colocated_instance_saves_a_prompt_once() -> None:
    """Though no answer fills a block."""
    prompt = make_request(1, 100, 1, 0.0).prompt
    asked = [
        replace(make_request(1 + turn, 100, 3, 1.0 + TURN_S * turn, prompt=prompt), has_next_turn=True)
        for turn in range(4)
    ]
    island, held = colocated_of(), list[RequestKey]()

    def hear(now: float, event: Event, sends: list[Send]) -> None:
        if isinstance(event, Received) and isinstance(event.message, DecodeReport):
            held.extend(event.message.ended)

    island.router.observers.append(hear)
    lose_between_turns(island)
    play(island, asked)
    assert [num_computed(island)[each.key] for each in asked] == [102, 6, 6, 6]
    assert held == [asked[0].key]


def lose_between_turns(island: SimIsland) -> None:
    for turn in range(4):
        for process in island.colocated:
            island.world.clock.at(TURN_S * turn + 15.0, process.kill)
            island.world.clock.at(TURN_S * turn + 16.0, process.start)


def test_an_answer_without_a_next_turn_is_not_kept() -> None:
    turns = chat(1, has_next_turn=False)
    island = play(small_island(enable_prefix_caching=True), turns)
    assert num_computed(island)[turns[-1].key] > NUM_NEW + NUM_OUTPUT + 2 * BLOCK_SIZE


@pytest.mark.parametrize(("promised_share", "num_found"), [(0.0, 0), (0.25, 64), (0.05, 0)])
def test_a_tool_s_result_finds_the_chat_in_a_flooded_pool(promised_share: float, num_found: int) -> None:
    # The first turn has 79 tokens with KV.
    before, after = chat(1, num_turns=2)
    before = replace(before, awaits="tool", owner="mine")
    after = replace(after, brings_results=True, arrival_s=9.0)
    flood = [replace(chat(number, num_turns=1)[0], arrival_s=3.0 + number / 8) for number in range(2, 26)]
    # Others with the same words find nothing of it, and take nothing from it.
    theirs = [
        replace(each, key=RequestKey(each.key + 10_000), cache_salt="theirs", owner="theirs", arrival_s=2.0)
        for each in (before, after)
    ]
    options: dict[str, Any] = {"num_prefill": 1, "num_decode": 1, "promised_share": promised_share}
    island = small_island(enable_prefix_caching=True, pool_blocks=48, **options)
    forget_at(island, 8.0)
    play(island, [before, *theirs, *flood, after])
    computed = num_computed(island)
    assert computed[after.key] == len(after.prompt) + NUM_OUTPUT - 1 - num_found
    assert computed[theirs[0].key] == len(before.prompt) + NUM_OUTPUT - 1


def forget_at(island: SimIsland, time_s: float) -> None:
    """The instances lose what they have."""
    for process in (*island.prefills, *island.decodes):
        island.world.clock.at(time_s, process.kill)
        island.world.clock.at(time_s + 0.1, process.start)


def test_a_pool_with_hardly_any_room_changes_no_token() -> None:
    chats = [chat(number, num_turns=3) for number in range(1, 7)]
    asked = in_order(chats)
    play(island_of(pool_blocks=32, decode=limits(num_blocks=40)), asked)


@pytest.mark.parametrize(("window", "is_kept"), [(100, True), (20, False)])
def test_an_answer_that_is_longer_than_the_window_is_not_kept(window: int, is_kept: bool) -> None:
    """A prompt's full columns are there in any case."""
    chats, num_held = [chat(1, num_turns=2)], 0
    short = replace(limits(), window=window, tile_tokens=16)
    island = island_of(prefill=short, decode=short)

    def count(now: float, event: Event, sends: list[Send]) -> None:
        nonlocal num_held
        if isinstance(event, Received) and isinstance(event.message, DecodeReport):
            num_held += len(event.message.ended)

    island.router.observers.append(count)
    play(island, in_order(chats))
    assert num_held == (2 if is_kept else 0)
    first, second = chats[0]
    num_common = len(first.prompt) + (NUM_OUTPUT - 1 if is_kept else 0)
    num_new = len(second.prompt) - num_common // BLOCK_SIZE * BLOCK_SIZE
    assert num_computed(island)[second.key] == num_new + NUM_OUTPUT - 1
