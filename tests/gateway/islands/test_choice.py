"""The choice of an island for a request, depending on what is known about each island."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from alignedserve.gateway.islands.choice import CROWDED_MORE, CROWDED_TIMES, IslandLoad, best
from alignedserve.protocol.messages import Load, Request
from alignedserve.sampling_params import SamplingParams
from alignedserve.scheduling.prefixes import TOKENS_PER_HASH, block_hashes
from alignedserve.types import RequestKey


@dataclass(eq=False)
class Island:
    is_up: bool = True
    is_given_up: bool = False
    is_leaving: bool = False
    num_open: int = 0
    island_load: IslandLoad = field(default_factory=IslandLoad)

    def send(self, sent: Request) -> None:
        self.island_load.sent(sent, block_hashes(sent))


def island(num_requests: int = 0, **fields: Any) -> Island:
    found = Island()
    defaults = {"num_prefills": 1, "num_decodes": 1, "num_cache_tokens": 100_000, "tokens_per_s": 1000.0}
    found.island_load.hear(Load(num_requests, 0.0, **{**defaults, **fields}))
    return found


def request(prompt: list[int] | None = None, tier: str = "rt", **fields: Any) -> Request:
    return Request(RequestKey(1), prompt or [7] * 100, SamplingParams(), 0, 0.0, tier=tier, **fields)


def choose(islands: list[Island], of: Request) -> int:
    return islands.index(best(islands, of, block_hashes(of)))


def test_one_that_is_up_goes_before_one_that_leaves_and_one_that_is_away() -> None:
    away, given_up, leaving, up = Island(False), Island(False, True), Island(is_leaving=True), Island()
    up.num_open = 100
    order = [up, leaving, away, given_up]
    for number, expected in enumerate(order):
        assert best(order[number:], request()) is expected


def test_without_their_word_the_fewest_open_requests_decide() -> None:
    islands = [island(num_rt_tokens=9000), Island(num_open=2), Island(num_open=1)]
    islands[0].num_open = 3
    assert choose(islands, request()) == 2
    assert best([island(), island()]).num_open == 0, "and where there is no request yet"


def test_real_time_goes_where_less_real_time_waits_and_best_effort_where_less_of_all() -> None:
    islands = [island(num_rt_tokens=100, num_tokens=5000), island(num_rt_tokens=1000, num_tokens=1000)]
    assert (choose(islands, request()), choose(islands, request(tier="be"))) == (0, 1)


def test_more_instances_are_through_with_more() -> None:
    assert choose([island(num_rt_tokens=1000), island(num_rt_tokens=1500, num_prefills=2)], request()) == 1


def test_a_faster_island_is_through_sooner() -> None:
    islands = [island(num_rt_tokens=1000), island(num_rt_tokens=1500, tokens_per_s=2000.0)]
    assert choose(islands, request()) == 1
    # As long as that is known of all.
    islands.append(island(num_rt_tokens=1400, tokens_per_s=0.0))
    assert choose(islands, request()) == 0


def test_a_prompt_goes_where_its_beginning_went_unless_that_takes_longer() -> None:
    prompt = list(range(1000))
    islands = [island(), island()]
    islands[1].send(request(prompt))
    islands[1].island_load.hear(Load(0, 0.0, num_prefills=1, num_decodes=1, num_cache_tokens=100_000))
    islands[0].island_load.hear(Load(0, 0.0, num_prefills=1, num_decodes=1, num_cache_tokens=100_000))
    again = request([*prompt, 5, 6, 7])
    assert choose(islands, again) == 1
    assert choose(islands, request([9, *prompt])) == 0, "another beginning"
    assert choose(islands, request([*prompt], cache_salt="theirs")) == 0, "another client's"
    islands[1].island_load.hear(
        Load(0, 0.0, num_rt_tokens=2000, num_prefills=1, num_decodes=1, num_cache_tokens=100_000)
    )
    assert choose(islands, again) == 0


def test_what_was_sent_since_the_last_word_counts() -> None:
    islands = [island(), island()]
    chosen = []
    for first in range(4):
        each = request([first] * 500)
        chosen.append(choose(islands, each))
        islands[chosen[-1]].send(each)
    assert chosen == [0, 1, 0, 1]
    # Its word includes it.
    islands[0].island_load.hear(Load(2, 0.0, num_prefills=1, num_decodes=1, num_cache_tokens=100_000))
    assert choose(islands, request()) == 0


def test_nobody_is_crowded_for_what_it_knows() -> None:
    prompt = list(range(10 * TOKENS_PER_HASH))
    most = int(CROWDED_TIMES * 4 + CROWDED_MORE)
    for count, expected in ((most, 1), (most + 1, 0)):
        islands = [island(4), island(count)]
        islands[1].island_load._prefixes.add(block_hashes(request(prompt)))  # type: ignore[union-attr]
        for tier in ("rt", "be"):
            assert choose(islands, request(prompt, tier)) == expected
    # One of twice the size has twice as many.
    islands = [island(4), island(2 * most, num_decodes=2)]
    islands[1].island_load._prefixes.add(block_hashes(request(prompt)))  # type: ignore[union-attr]
    assert choose(islands, request(prompt)) == 1


def test_real_time_goes_where_it_keeps_its_objective_and_can_decode() -> None:
    prompt = list(range(1000))
    # 1.1 s and room, 0.1 s (what it knows) and none.
    islands = [island(num_rt_tokens=100), island(num_rt_tokens=100, is_full=True)]
    islands[1].island_load._prefixes.add(block_hashes(request(prompt)))  # type: ignore[union-attr]
    assert choose(islands, request(prompt)) == 0
    assert choose(islands, request(prompt, ttft_s=2.0)) == 0
    assert choose(islands, request(prompt, ttft_s=0.5)) == 1, "the first token at least"
    assert choose(islands, request(prompt, tier="be")) == 1


def test_an_island_without_instances_for_prompts_comes_last() -> None:
    assert (
        choose([island(num_prefills=0, num_cache_tokens=0), island(50, num_rt_tokens=9000)], request()) == 1
    )


@pytest.mark.parametrize("num_cache_tokens", [0, 10 * TOKENS_PER_HASH])
def test_no_more_is_remembered_than_there_is_room_for(num_cache_tokens: int) -> None:
    found = island(num_cache_tokens=num_cache_tokens)
    assert found.island_load.has_caches == (num_cache_tokens > 0)
    for first in range(30):
        found.send(request([first] * TOKENS_PER_HASH))
    known = [
        TOKENS_PER_HASH - found.island_load.num_missing(each, block_hashes(each))
        for each in (request([first] * TOKENS_PER_HASH) for first in range(30))
    ]
    assert sum(known) == num_cache_tokens and known == sorted(known)
