from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from alignedserve.scheduling.block_hashes import block_hashes_of

TOKENS = st.lists(st.integers(0, 2), max_size=20)
SALTS = st.sampled_from(["", "a", "b"])


@given(TOKENS, TOKENS, SALTS, SALTS)
def test_names_are_the_same_as_far_as_prompts_and_salts_are(
    one: list[int], other: list[int], salt: str, other_salt: str
) -> None:
    names, other_names = block_hashes_of(one, 4, salt), block_hashes_of(other, 4, other_salt)
    assert (len(names), len(other_names)) == (len(one) // 4, len(other) // 4)
    for block, (name, other_name) in enumerate(zip(names, other_names, strict=False), 1):
        is_same = salt == other_salt and one[: 4 * block] == other[: 4 * block]
        assert (name == other_name) == is_same
    assert len(set(names)) == len(names)
