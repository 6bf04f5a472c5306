"""Any requests that enter and leave in any order, against a set of the hashes that they have."""

from __future__ import annotations

from hashlib import sha256

from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.router.prefix_counts import PrefixCounts, Run

PROMPTS = st.lists(st.sampled_from("ab"), max_size=8).map("".join)
# a request that enters, with its class; or the number of one that leaves
STEPS = st.lists(st.tuples(PROMPTS, st.booleans()) | st.integers(0, 30), max_size=60)


def hashes_of(prompt: str) -> list[bytes]:
    return [sha256(prompt[:end].encode()).digest() for end in range(1, len(prompt) + 1)]


def sets_of(is_rt: bool) -> list[int]:
    return [0] if is_rt else [0, 1]


@given(STEPS, st.lists(PROMPTS, max_size=3))
@settings(max_examples=300, deadline=None)
def test_blocks_count_once_whoever_leaves_first(
    steps: list[tuple[str, bool] | int], asked: list[str]
) -> None:
    counts = PrefixCounts(num_sets=2)
    present: list[tuple[str, bool, Run | None]] = []
    for step in [*steps, *[0] * len(steps)]:
        if not isinstance(step, int):
            prompt, is_rt = step
            present.append((prompt, is_rt, counts.add(hashes_of(prompt), sets_of(is_rt))))
        elif present:
            _, is_rt, run = present.pop(step % len(present))
            counts.discard(run, sets_of(is_rt))
        everything = {each for prompt, *_ in present for each in hashes_of(prompt)}
        of_be = {each for prompt, is_rt, _ in present for each in hashes_of(prompt) if not is_rt}
        assert counts.num_blocks == [len(everything), len(of_be)]
        for prompt in asked:
            assert counts.num_found(hashes_of(prompt)) == len(everything & {*hashes_of(prompt)})
            assert counts.num_found(hashes_of(prompt), 1) == len(of_be & {*hashes_of(prompt)})
    assert not present and not counts._runs


def test_a_thousand_requests_behind_a_prefix_are_two_runs_each() -> None:
    counts, prefix = PrefixCounts(num_sets=1), hashes_of("a" * 500)
    runs = [counts.add([*prefix, sha256(bytes([n % 256, n // 256])).digest()], [0]) for n in range(1000)]
    assert counts.num_blocks == [1500] and len(counts._runs) == 1001
    for run in runs:
        counts.discard(run, [0])
    assert counts.num_blocks == [0]
