"""One owner asks for far more than there is, and another one for little, in virtual time."""

from __future__ import annotations

from collections import Counter
from functools import cache
from statistics import median
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from alignedserve.protocol.messages import Request
from alignedserve.scheduling.policies import POLICIES
from alignedserve.sim.island import SimIsland
from alignedserve.sim.model import make_request
from alignedserve.types import RequestKey
from tests.scheduling.keeping_inputs import NAME
from tests.sim.islands import every_policy, finish, limits, requests, small_island

MUCH, LITTLE = "much", "little"
NUM_MUCH, NUM_LITTLE, RUN_S = 200, 10, 8.0


class Seen(NamedTuple):
    # Medians over the calls of the owner that wants little, in seconds.
    ttft_s: float
    whole_s: float
    # Tokens of the other one.
    num_tokens: int


def owned(key: int, owner: str, arrival_s: float, num_tokens: int, tier: str = "rt") -> Request:
    """`tier`: "plain" is real time without objectives."""
    made = make_request(
        key=key,
        prompt_len=20,
        num_output_tokens=num_tokens,
        arrival_s=arrival_s,
        max_tokens=num_tokens,
        tier="rt" if tier == "plain" else tier,
    )
    objectives = {"ttft_s": 1.0, "tbt_s": 0.1} if tier == "rt" else {}
    return replace(made, owner=owner, cache_salt=owner, **objectives)


def little() -> list[Request]:
    return [owned(1000 + n, LITTLE, 2.0 + 0.4 * n, 8) for n in range(NUM_LITTLE)]


def much(tier: str = "rt", owner: str = MUCH, first_key: int = 1) -> list[Request]:
    return [owned(first_key + n, owner, 1.0, 200, tier) for n in range(NUM_MUCH)]


def island(policy: str, is_colocated: bool) -> SimIsland:
    sizes = limits(num_blocks=512, max_num_batched_tokens=128)
    made = small_island(
        policy, pool_blocks=6000, prefill=sizes, decode=sizes, num_colocated=1 if is_colocated else 0
    )
    made.start()
    return made


@cache
def run(policy: str, is_colocated: bool, tier: str = "") -> Seen:
    """`tier`: that of the flood; empty: there is none."""
    made = island(policy, is_colocated)
    flood = much(tier) if tier else []
    made.submit([*flood, *little()])
    made.run(RUN_S)
    short = [each for each in made.streams if each.request.owner == LITTLE]
    assert all(each.is_complete for each in short), [each.outcome for each in short]
    return Seen(
        median(each.times_s[0] - each.request.arrival_s for each in short),
        median(each.ended_s - each.request.arrival_s for each in short),
        sum(len(each.tokens) for each in made.streams if each.request.owner == MUCH),
    )


@pytest.mark.parametrize("is_colocated", [False, True], ids=["apart", "colocated"])
@pytest.mark.parametrize("tier", ["rt", "plain", "be"])
@every_policy
def test_who_wants_little_gets_it_about_as_soon_as_alone(policy: str, tier: str, is_colocated: bool) -> None:
    """Without turns, most policies do not answer it at all in this time."""
    alone, beside = run(policy, is_colocated), run(policy, is_colocated, tier)
    # A victim's KV is copied before its slot is free, and prompts of others are in the same iteration.
    # Policies with classes have some iterations to make room in best effort themselves.
    assert beside.ttft_s < (8 if tier == "be" else 4) * alone.ttft_s
    assert beside.whole_s < 3 * alone.whole_s
    # The instance is as full as without others: 16 requests run at a time.
    assert beside.num_tokens > 3000


@cache
def median_ttft_s(policy: str, tier: str = "") -> float:
    """Returns the median time to the first token of short calls. Beside them, short prompts of another owner fill what
    is started ahead at an instance that only computes prompts. `tier`: that of the flood; empty: there is none."""
    sizes = limits(num_blocks=4096, max_num_seqs=64, max_num_batched_tokens=256)
    made = small_island(policy, pool_blocks=60_000, prefill=sizes, decode=sizes)
    made.start()
    flood = [owned(1 + n, MUCH, 1.0 + 0.002 * n, 1, tier) for n in range(2000 if tier else 0)]
    calls = [owned(5000 + n, LITTLE, 1.5 + 0.1 * n, 2) for n in range(NUM_LITTLE)]
    made.submit([*flood, *calls])
    made.run(6.0)
    short = [each for each in made.streams if each.request.owner == LITTLE]
    return median(each.times_s[0] - each.request.arrival_s for each in short)


@pytest.mark.parametrize("tier", ["rt", "plain", "be"])
@every_policy
def test_short_prompts_of_one_owner_do_not_hold_up_another_ones_where_prefill_is_separate(
    policy: str, tier: str
) -> None:
    """They wait for the iteration that runs, and are in the next one, which is as long as it may be."""
    assert median_ttft_s(policy, tier) < 4 * median_ttft_s(policy)


@pytest.mark.parametrize("is_colocated", [False, True], ids=["apart", "colocated"])
def test_many_batch_lines_of_one_owner_do_not_stop_a_flex_call_of_another(is_colocated: bool) -> None:
    """It begins next, and gets the slot of a line that ends."""
    made = island("aligned", is_colocated)
    made.submit([*much("be"), owned(1000, LITTLE, 2.0, 8, "be")])
    made.run(10.0)
    short = next(each for each in made.streams if each.request.owner == LITTLE)
    lines = [each for each in made.streams if each.request.owner == MUCH]
    assert short.is_complete and sum(each.is_complete for each in lines) < NUM_MUCH / 2


@pytest.mark.parametrize("is_colocated", [False, True], ids=["apart", "colocated"])
@every_policy
def test_owners_that_want_much_get_equal_parts(policy: str, is_colocated: bool) -> None:
    """Of slots, when all prompts of both have come that fit; 16 requests run at a time."""
    made = island(policy, is_colocated)
    late = [replace(each, arrival_s=1.5) for each in much(owner="more", first_key=5000)]
    made.submit([*much(), *late])
    made.run(3.0)
    assert made.router.core
    (view,) = made.router.core.state.cluster.decodes
    owners = Counter(made.router.core.state.requests[key].owner for key in view.running)
    assert abs(owners[MUCH] - owners["more"]) <= 2, owners


def test_nothing_is_left_when_all_have_ended() -> None:
    for policy in POLICIES:
        made = island(policy, is_colocated=True)
        requests = [*much()[:30], *little()]
        made.submit(requests)
        assert made.run_until_done(len(requests), limit_s=120.0)
        made.settle()
        made.check_idle()
        assert all(each.is_complete for each in made.streams)


@pytest.mark.parametrize("policy", ["apt", NAME])
def test_a_victim_with_inputs_is_computed_again(policy: str) -> None:
    """Inputs of layers can't go to the pool."""
    sizes = replace(limits(num_blocks=34), max_restored_blocks=34)
    made = small_island(policy, pool_blocks=400, decode=sizes, num_prefill=0, num_decode=0, num_colocated=1)
    made.start()
    many = [replace(each, owner=MUCH) for each in requests(12, every_s=0.0)]
    late = [
        replace(each, key=RequestKey(100 + each.key), arrival_s=0.5, owner=LITTLE) for each in requests(4)
    ]
    made.submit([*many, *late])
    finish(made, len(many) + len(late), limit_s=4000.0)
