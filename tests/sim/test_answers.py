"""Chats of several turns in virtual time: a turn computes what is new in it, whatever ran the one before."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from alignedserve.protocol.messages import Request
from alignedserve.sim.island import SimIsland
from alignedserve.sim.model import VOCABULARY, make_request, sample
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


def test_also_after_the_instances_that_had_it_are_gone() -> None:
    chats = [chat(number) for number in range(1, 4)]
    island = island_of()
    for process in (*island.prefills, *island.decodes):
        for turn in range(4):
            island.world.clock.at(TURN_S * turn + 15.0, process.kill)
            island.world.clock.at(TURN_S * turn + 16.0, process.start)
    play(island, in_order(chats))
    check_only_new_tokens(island, chats)


def test_an_answer_without_a_next_turn_is_not_kept() -> None:
    turns = chat(1, has_next_turn=False)
    island = play(small_island(enable_prefix_caching=True), turns)
    assert num_computed(island)[turns[-1].key] > NUM_NEW + NUM_OUTPUT + 2 * BLOCK_SIZE


def test_a_pool_with_hardly_any_room_changes_no_token() -> None:
    chats = [chat(number, num_turns=3) for number in range(1, 7)]
    asked = in_order(chats)
    play(island_of(pool_blocks=32, decode=limits(num_blocks=40)), asked)
