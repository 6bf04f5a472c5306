"""Prompts go where the KV of their prefix_affinity may be, unless it is quicker to compute it elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from alignedserve.protocol.messages import Gone, Prefill, Reserve, Submit
from alignedserve.scheduling.prefixes import TOKENS_PER_HASH, PrefixAffinity
from alignedserve.types import InstanceId, RequestKey
from tests.router.script import DECODE, GATEWAY, POOL, PREFILL, Script, request

SECOND = InstanceId("prefill-1")
NAMES = [bytes([number]) for number in range(5)]


def test_what_is_known_ends_where_the_first_name_is_missing() -> None:
    prefix_affinity = PrefixAffinity(max_tokens=100 * TOKENS_PER_HASH)
    assert prefix_affinity.num_cached_tokens(NAMES) == 0
    prefix_affinity.add([NAMES[0], NAMES[1], NAMES[3]])
    assert prefix_affinity.num_cached_tokens(NAMES) == 2 * TOKENS_PER_HASH
    assert prefix_affinity.num_cached_tokens([]) == 0


def test_what_was_not_seen_for_longest_is_forgotten() -> None:
    prefix_affinity = PrefixAffinity(max_tokens=6 * TOKENS_PER_HASH)
    prefix_affinity.add([b"old"])
    prefix_affinity.add([b"kept"])
    prefix_affinity.add([number.to_bytes(4) for number in range(4)])
    prefix_affinity.add([b"kept"])
    prefix_affinity.add([b"new"])
    assert [prefix_affinity.num_cached_tokens([block_hash]) for block_hash in (b"old", b"kept", b"new")] == [
        0,
        TOKENS_PER_HASH,
        TOKENS_PER_HASH,
    ]
    assert len(prefix_affinity._hashes) == 6


class Island:
    """Two prefill instances."""

    def __init__(self, enable_prefix_caching: bool = True) -> None:
        self.script = Script(connect=False)
        for name in ("kvpool", PREFILL, SECOND, "decode-0", GATEWAY):
            self.script.connect(name, num_blocks=1000, enable_prefix_caching=enable_prefix_caching)
        self._num_asked = 0

    def place(self, prompt: list[int], is_computed: bool = True, **changes: Any) -> str:
        """Where the prompt goes; unless told otherwise, it has been computed before the next one comes."""
        self._num_asked += 1
        key = self._num_asked
        self.script.say(GATEWAY, Submit(replace(request(key), prompt=prompt, **changes)))
        self.script.take()
        self.script.reserve(key, list(range(100 * key, 100 * key + 99)))
        (place,) = [name for name, message in self.script.take() if isinstance(message, Prefill)]
        if is_computed:
            self.script.first_token(key, sender=place, finish_reason="stop")
            self.script.say(place, Gone([RequestKey(key)]))
        return place


def prompt(num_tokens: int, first: int = 0) -> list[int]:
    return list(range(first, first + num_tokens))


@pytest.mark.parametrize("tier", ["rt", "be"])
def test_it_goes_where_one_that_begins_alike_went(tier: str) -> None:
    island = Island()
    assert island.place(prompt(70), is_computed=False, tier=tier) == PREFILL
    # less busy
    assert island.place(prompt(130, first=1000), tier=tier) == SECOND
    # busy with 70; but of 170, 128 are there already
    assert island.place(prompt(130, first=1000) + [7] * 40, tier=tier) == SECOND
    # most of it is its own, so that best effort does not wait for the first one either
    assert island.place(prompt(70) + [7] * 70, is_computed=False, tier=tier) == SECOND


@pytest.mark.parametrize(
    ("num_ahead", "place"), [(TOKENS_PER_HASH - 1, PREFILL), (TOKENS_PER_HASH + 1, SECOND)]
)
def test_the_one_with_less_to_do_gets_it_if_that_is_sooner(num_ahead: int, place: str) -> None:
    island = Island()
    assert island.place(prompt(70)) == PREFILL
    assert island.place(prompt(num_ahead, first=1000), is_computed=False) == PREFILL
    # one name's tokens are there
    assert island.place([*prompt(70), 1]) == place


def test_a_salt_is_part_of_a_hash() -> None:
    island = Island()
    assert island.place(prompt(140), cache_salt="a") == PREFILL
    assert island.place(prompt(10, first=1000), is_computed=False) == PREFILL
    assert island.place(prompt(140), cache_salt="b") == SECOND
    assert island.place(prompt(140), cache_salt="a") == PREFILL


def test_where_nothing_is_shared_it_goes_where_least_is_to_do() -> None:
    island = Island(enable_prefix_caching=False)
    assert island.place(prompt(140)) == PREFILL
    assert island.place(prompt(10, first=1000), is_computed=False) == PREFILL
    assert island.place(prompt(140)) == SECOND


def test_an_instance_that_starts_anew_has_nothing() -> None:
    island = Island()
    assert island.place(prompt(140)) == PREFILL
    island.script.close(PREFILL)
    island.script.connect(PREFILL, epoch=2, num_blocks=1000, enable_prefix_caching=True)
    assert island.place(prompt(10, first=1000), is_computed=False) == SECOND
    assert island.place(prompt(20, first=2000), is_computed=False) == PREFILL
    assert island.place(prompt(140)) == SECOND


@pytest.mark.parametrize(("enable_prefix_caching", "num_given"), [(True, 9), (False, 2)])
def test_what_an_instance_has_or_will_have_is_little_work_for_it(
    enable_prefix_caching: bool, num_given: int
) -> None:
    """Prompts that begin alike are given to it beyond its window of work: it has little to compute of each."""
    script = Script(connect=False, prefill_window=8)
    for name in (POOL, PREFILL, DECODE, GATEWAY):
        script.connect(name, num_blocks=1000, enable_prefix_caching=enable_prefix_caching)
    # of 256 tokens: the first prompt, and an eighth of each other one
    for key in range(1, 11):
        script.say(GATEWAY, Submit(replace(request(key), prompt=[*prompt(2 * TOKENS_PER_HASH), key])))
    given = []
    while said := script.take():
        for _, message in said:
            if isinstance(message, Reserve):
                script.reserve(message.key, list(range(100 * message.key, 100 * message.key + 99)))
            elif isinstance(message, Prefill):
                given += message.works
    assert len(given) == num_given
