from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from alignedserve.scheduling.prefixes import block_hashes_of

TOKENS = st.lists(st.integers(0, 2), max_size=20)
SALTS = st.sampled_from(["", "a", "b", "ab"])


@given(TOKENS, TOKENS, SALTS, SALTS, SALTS, SALTS)
def test_names_are_the_same_as_far_as_prompts_salts_and_adapters_are(
    one: list[int], other: list[int], salt: str, other_salt: str, adapter: str, other_adapter: str
) -> None:
    names = block_hashes_of(one, 4, salt, adapter)
    other_names = block_hashes_of(other, 4, other_salt, other_adapter)
    assert (len(names), len(other_names)) == (len(one) // 4, len(other) // 4)
    for block, (name, other_name) in enumerate(zip(names, other_names, strict=False), 1):
        is_alike = (salt, adapter) == (other_salt, other_adapter)
        is_same = is_alike and one[: 4 * block] == other[: 4 * block]
        assert (name == other_name) == is_same
    assert len(set(names)) == len(names)
