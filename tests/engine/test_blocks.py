from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.engine.blocks import NO_BLOCK, BlockManager
from alignedserve.engine.kv_cache import KVCache, new_blocks
from alignedserve.kv.format import BlockFormat
from alignedserve.kv.span import KvSpan
from alignedserve.types import BlockId, RequestId

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 6), st.booleans()), max_size=60))
def test_no_sequence_of_calls_loses_or_doubles_a_block(calls: list[tuple[str, int, bool]]) -> None:
    blocks = BlockManager(10)
    for name, count, is_free in calls:
        owner, before = RequestId(name), blocks.num_free
        if is_free:
            blocks.free(owner)
        else:
            found = blocks.allocate(owner, count)
            assert (found is None) == (count > before)
            assert blocks.num_free == before - len(found or [])
        blocks.check()
    for name in "abcd":
        blocks.free(RequestId(name))
    blocks.check_idle()
    assert blocks.num_free == 10


OWNERS = "abcd"
# A hash stands for all blocks up to its own: prompts are numbers of hashes, of two kinds.
CALLS = st.tuples(
    st.sampled_from(["allocate", "share", "name", "forget", "free"]),
    st.sampled_from(OWNERS),
    st.integers(0, 6),
)


@pytest.mark.slow
@settings(max_examples=300)
@given(st.booleans(), st.lists(CALLS, min_size=20, max_size=80))
def test_no_sequence_of_calls_with_names_loses_a_block_or_mistakes_one(
    counts_once: bool, calls: list[tuple[str, str, int]]
) -> None:
    blocks = BlockManager(10)
    blocks.count_once(counts_once)
    # what is in each block: who wrote it, and how many blocks into its prompt that is
    content: dict[BlockId, bytes] = {}
    for call, name, count in calls:
        owner, before = RequestId(name), blocks.num_free
        # a and b begin alike, c and d as well
        prompt = [bytes([OWNERS.index(name) // 2, position]) for position in range(8)]
        num_held = len(blocks.held(owner))
        if call == "free":
            num_left = blocks.num_shared(owner)
            blocks.free(owner)
            assert blocks.num_free == before + num_held - num_left
        elif call == "share":
            if not num_held:
                num_already = blocks.num_held(prompt[:count])
                num_shared = blocks.share(owner, prompt[:count])
                assert [content[block] for block in blocks.held(owner)] == prompt[:num_shared]
                assert blocks.num_free == before - num_shared + num_already
                assert blocks.num_shared(owner) == num_already
        elif call == "name":
            blocks.publish(owner, 0, prompt[: min(count, num_held)])
        elif call == "forget":
            blocks.forget_all()
            assert blocks.num_known(prompt) == 0
            assert blocks.num_free == before
        else:
            count = min(count, 8 - num_held)
            found = blocks.allocate(owner, count)
            assert (found is None) == (count > before)
            others = {block for other in OWNERS if other != name for block in blocks.held(RequestId(other))}
            assert not others & set(found or [])
            content |= dict(zip(found or [], prompt[num_held:], strict=False))
            assert blocks.num_free == before - len(found or [])
        assert blocks.num_free >= 0
        blocks.check()
    for name in OWNERS:
        blocks.free(RequestId(name))
    blocks.check_idle()
    assert blocks.num_free == 10


def test_what_was_kept_is_taken_last_and_its_end_before_its_beginning() -> None:
    blocks = BlockManager(6)
    block_hashes = [b"1", b"12", b"123"]
    blocks.allocate(A, 3)
    blocks.publish(A, 0, block_hashes)
    blocks.free(A)
    assert (blocks.num_free, blocks.num_kept) == (6, 3)
    blocks.allocate(B, 4)
    assert (blocks.num_free, blocks.num_kept) == (2, 2)
    assert blocks.share(A, block_hashes) == 2
    assert (blocks.num_free, blocks.num_kept) == (0, 0)
    blocks.check()


def test_a_shared_block_counts_for_each_owner() -> None:
    blocks = BlockManager(6)
    blocks.allocate(A, 2)
    blocks.publish(A, 0, [b"1", b"12"])
    assert blocks.share(B, [b"1", b"12", b"123"]) == 2
    assert blocks.num_free == 2 and blocks.allocate(B, 3) is None
    blocks.free(A)
    assert (blocks.num_free, blocks.num_kept) == (4, 0)
    blocks.free(B)
    assert (blocks.num_free, blocks.num_kept) == (6, 2)
    blocks.check_idle()


def test_a_shared_block_counts_once_if_it_is_to() -> None:
    blocks = BlockManager(6)
    blocks.count_once(True)
    blocks.allocate(A, 2)
    blocks.publish(A, 0, [b"1", b"12"])
    assert blocks.num_held([b"1", b"12", b"123"]) == 2
    assert blocks.share(B, [b"1", b"12", b"123"]) == 2
    assert (blocks.num_free, blocks.num_shared(A), blocks.num_repeated) == (4, 2, 2)
    assert blocks.allocate(B, 4)
    blocks.free(A)
    assert (blocks.num_free, blocks.num_shared(B), blocks.num_repeated) == (0, 0, 0)
    blocks.check()
    blocks.free(B)
    assert (blocks.num_free, blocks.num_kept) == (6, 2)
    assert blocks.num_held([b"1"]) == 0, "it would be in use again"
    blocks.check_idle()


def test_what_is_read_once_is_divided_among_its_owners() -> None:
    """A and B have four blocks in common, and C two of them."""
    blocks = BlockManager(20)
    blocks.count_once(True)
    hashes = [bytes([number]) for number in range(6)]
    blocks.allocate(A, 6)
    blocks.publish(A, 0, hashes)
    assert blocks.num_read_by_others(A) == blocks.num_read_by_others(B) == 0
    assert (blocks.share(B, hashes[:4]), blocks.share(C, hashes[:2])) == (4, 2)
    blocks.allocate(B, 1)
    blocks.allocate(C, 1)
    shares = {owner: blocks.num_read_by_others(owner) for owner in (A, B, C)}
    assert shares == pytest.approx({A: 2 * 2 / 3 + 2 / 2, B: 2 * 2 / 3 + 2 / 2, C: 2 * 2 / 3})
    assert sum(shares.values()) == pytest.approx(blocks.num_repeated)
    blocks.free(B)
    assert (blocks.num_read_by_others(A), blocks.num_read_by_others(C)) == (1, 1)


def test_with_a_window_each_owner_counts() -> None:
    blocks = with_window(20)
    blocks.count_once(True)
    blocks.grow(A, 8)
    blocks.publish(A, 0, PROMPT[:8])
    assert blocks.num_held(PROMPT[:8]) == 0
    assert blocks.share(B, PROMPT) == 8 and blocks.num_shared(A) == 0
    assert blocks.num_free == 20 - 8 - 2
    blocks.check()


def test_behind_what_arrives_the_window_is_that_of_all_of_it() -> None:
    blocks = with_window(45, MIXED)
    blocks.grow(A, 8)
    blocks.publish(A, 0, PROMPT[:3])
    # With KV of more columns elsewhere, those before the sixth need no blocks of the sliding group.
    assert [blocks.num_known(PROMPT[:8], num_passed) for num_passed in (0, 6)] == [3, 3]
    blocks.free_passed(A, 6)
    blocks.publish(A, 3, PROMPT[3:8])
    blocks.forget_all()
    blocks.publish(A, 0, PROMPT[:8])
    assert [blocks.num_known(PROMPT[:8], num_passed) for num_passed in (0, 1, 6)] == [0, 1, 8]
    assert blocks.share(B, PROMPT[:4], 6) == 4
    assert (blocks.held(B, 0), blocks.held(B, 2)) == (blocks.held(A, 0)[:4], [NO_BLOCK] * 6)
    assert blocks.grow(B, 8, 6)
    assert [len(blocks.held(B, group)) for group in range(3)] == [8, 8, 8]
    assert not {*blocks.held(B, 0)[4:]} & {*blocks.held(A, 0)}
    blocks.check()


def test_a_name_is_one_blocks() -> None:
    blocks = BlockManager(4)
    for owner in (A, B):
        blocks.allocate(owner, 1)
        blocks.publish(owner, 0, [b"1"])
    blocks.free(A)
    blocks.free(B)
    assert (blocks.num_free, blocks.num_kept) == (4, 1)


def test_who_has_blocks_can_not_share() -> None:
    blocks = BlockManager(2)
    blocks.allocate(A, 1)
    with pytest.raises(RuntimeError, match="a: holds 1 blocks before it shares any"):
        blocks.share(A, [b"1"])


# ---- blocks behind a window: of 2 tokens in blocks of 32, the tile of 64 tokens that it begins in is needed too ----

SPAN = KvSpan(32, 2)
# Two groups of layers that attend to all tokens, and one with the window.
MIXED = KvSpan(32, 2, num_full_groups=2, num_sliding_groups=1)
PROMPT = [bytes([position]) for position in range(9)]


def with_window(num_blocks: int, span: KvSpan = SPAN) -> BlockManager:
    blocks = BlockManager(num_blocks, span)
    blocks.keep_window(span)
    return blocks


def test_what_is_passed_is_free_and_keeps_its_place() -> None:
    blocks = with_window(6)
    assert blocks.grow(A, 5) == [(0, [0, 1, 2, 3, 4])]
    assert blocks.free_passed(A, 2) == [(5, [])]
    assert blocks.held(A) == [NO_BLOCK, NO_BLOCK, 2, 3, 4] and blocks.num_free == 3
    blocks.check()
    blocks.free_passed(A, 4)
    assert blocks.grow(A, 10) is not None and blocks.num_free == 0
    blocks.check()
    blocks.free(A)
    blocks.check_idle()
    assert blocks.num_free == 6


def test_groups_hold_a_block_of_each_column_side_by_side() -> None:
    blocks = with_window(12, MIXED)
    assert blocks.grow(A, 3) == [(0, [0, 3, 6]), (0, [1, 4, 7]), (0, [2, 5, 8])]
    assert blocks.in_columns(A, 1, 3) == [3, 4, 5, 6, 7, 8]
    assert blocks.num_missing(A, 5) == 6 and blocks.grow(A, 5) is None
    assert blocks.num_free == 3
    blocks.free_passed(A, 2)
    assert [blocks.held(A, group) for group in range(3)] == [[0, 3, 6], [1, 4, 7], [NO_BLOCK, NO_BLOCK, 8]]
    assert blocks.in_columns(A, 1, 2) == [3, 4, NO_BLOCK]
    assert blocks.num_free == 5
    blocks.check()
    # One that comes from elsewhere has passed its first columns.
    grown = blocks.grow(B, 2, num_passed=1)
    assert (
        grown and [len(new) for _, new in grown] == [2, 2, 1] and [first for first, _ in grown] == [0, 0, 1]
    )
    blocks.check()
    for owner in (A, B):
        blocks.free(owner)
    blocks.check_idle()
    assert blocks.num_free == 12


def test_sliding_groups_wait_for_columns_to_be_passed() -> None:
    span = KvSpan(32, 2, max_step=32, num_full_groups=1, num_sliding_groups=1)
    assert span.most == 4
    blocks = with_window(14, span)
    grown = blocks.grow(A, 10)
    assert grown and [len(new) for _, new in grown] == [10, 4] and blocks.num_free == 0
    grown = blocks.free_passed(A, 3)
    assert [(first, len(new)) for first, new in grown] == [(10, 0), (4, 3)] and blocks.num_free == 0
    grown = blocks.free_passed(A, 7)
    # Nothing is after the tenth.
    assert [(first, len(new)) for first, new in grown] == [(10, 0), (7, 3)] and blocks.num_free == 1
    blocks.check()
    blocks.free(A)
    blocks.check_idle()


def test_a_prefix_is_known_if_what_is_seen_behind_it_is_there() -> None:
    blocks = with_window(9)
    blocks.grow(A, 8)
    # After 7 blocks the next token sees the last of them, and the tile begins with the one before.
    assert SPAN.num_passed(7 * 32) == 6 and SPAN.num_passed(8 * 32) == 6
    blocks.free_passed(A, 6)
    blocks.publish(A, 0, PROMPT[:8])
    assert [blocks.num_known(PROMPT[:count]) for count in range(10)] == [0, 0, 0, 0, 0, 0, 0, 7, 8, 8]
    assert blocks.share(B, PROMPT) == 8
    assert blocks.held(B) == [NO_BLOCK] * 6 + blocks.held(A)[6:]
    # A block counts once for each of its owners.
    assert blocks.num_free == 9 - 2 - 2
    blocks.check()
    for owner in (A, B):
        blocks.free(owner)
    blocks.check_idle()
    assert blocks.num_kept == 2
    assert blocks.grow(A, 8) and blocks.num_known(PROMPT) == 7


def test_of_a_prefix_full_groups_need_all() -> None:
    blocks = with_window(45, MIXED)
    blocks.grow(A, 8)
    blocks.publish(A, 0, PROMPT[:3])
    blocks.free_passed(A, 6)
    blocks.publish(A, 3, PROMPT[3:8])
    # Of the columns before the fourth all groups have been published, of others those that A holds still.
    assert [blocks.num_known(PROMPT[:count]) for count in range(10)] == [0, 1, 2, 3, 3, 3, 3, 7, 8, 8]
    assert blocks.share(B, PROMPT) == 8
    assert (
        blocks.held(B, 0) == blocks.held(A, 0) and blocks.held(B, 2) == [NO_BLOCK] * 6 + blocks.held(A, 2)[6:]
    )
    assert blocks.num_free == 45 - 2 * 18
    blocks.check()
    for owner in (A, B):
        blocks.free(owner)
    blocks.check_idle()
    # What was passed was kept first, and is taken first; then comes the last column.
    blocks.allocate(A, 45 - blocks.num_kept + 3)
    assert blocks.num_known(PROMPT) == 8
    blocks.allocate(A, 1)
    assert blocks.num_known(PROMPT) == 7


def test_what_was_passed_is_kept_for_others() -> None:
    blocks = with_window(9)
    blocks.grow(A, 6)
    blocks.publish(A, 0, PROMPT[:6])
    blocks.free_passed(A, 4)
    assert (blocks.num_free, blocks.num_kept) == (7, 4)
    assert blocks.share(B, PROMPT[:3]) == 3
    assert NO_BLOCK in blocks.held(B) and len(blocks.held(B)) == 3
    blocks.check()


GROUP_CALLS = st.tuples(
    st.sampled_from(["grow", "pass", "share", "publish", "forget", "free"]),
    st.sampled_from(OWNERS),
    st.integers(0, 8),
)


@pytest.mark.slow
@settings(max_examples=300)
@given(st.sampled_from([(0, 1), (1, 1), (1, 3), (2, 2)]), st.lists(GROUP_CALLS, min_size=20, max_size=80))
def test_no_sequence_of_calls_with_groups_loses_a_block_or_mistakes_one(
    groups: tuple[int, int], calls: list[tuple[str, str, int]]
) -> None:
    span = KvSpan(32, 33, 40, *groups)
    blocks = with_window(30, span)
    # What is in each block: its group, and the prompt up to its end.
    content: dict[BlockId, tuple[int, bytes]] = {}
    passed: dict[RequestId, int] = {}
    for call, name, count in calls:
        owner, before = RequestId(name), blocks.num_free
        prompt = [bytes([OWNERS.index(name) // 2, position]) for position in range(9)]
        held = _groups_of(blocks, owner, span)
        if call == "free":
            passed.pop(owner, None)
            blocks.free(owner)
            assert blocks.num_free == before + sum(block != NO_BLOCK for each in held for block in each)
        elif call == "grow":
            missing = blocks.num_missing(owner, count)
            assert (blocks.grow(owner, count) is None) == (missing > before)
            assert blocks.num_free == before - (missing if missing <= before else 0)
            passed.setdefault(owner, 0)
        elif call == "share" and owner not in passed:
            if num_shared := blocks.share(owner, prompt[:count]):
                passed[owner] = span.num_passed(num_shared * 32)
                held = _groups_of(blocks, owner, span)
                assert before - blocks.num_free == span.num_held(num_shared * 32, num_shared * 32)
        elif call == "pass" and owner in passed and held[-1]:
            passed[owner] = max(passed[owner], min(count, len(held[-1])))
            blocks.free_passed(owner, passed[owner])
            assert blocks.num_free >= before
        elif call == "publish":
            blocks.publish(owner, 0, prompt[: min(count, *map(len, held))])
        elif call == "forget":
            blocks.forget_all()
            assert blocks.num_free == before
        for group, (then, now) in enumerate(zip(held, _groups_of(blocks, owner, span), strict=True)):
            content |= {now[column]: (group, prompt[column]) for column in range(len(then), len(now))}
            num_passed = passed.get(owner, 0) if group >= groups[0] else 0
            for column, block in enumerate(now):
                assert (block == NO_BLOCK) == (column < num_passed)
                assert block == NO_BLOCK or content[block] == (group, prompt[column])
        blocks.check()
    for name in OWNERS:
        blocks.free(RequestId(name))
    blocks.check_idle()


def _groups_of(blocks: BlockManager, owner: RequestId, span: KvSpan) -> list[list[BlockId]]:
    return [[*blocks.held(owner, group)] for group in range(span.num_groups)]


def test_leaks_are_told_with_both_numbers() -> None:
    blocks = BlockManager(4)
    blocks.allocate(A, 3)
    with pytest.raises(RuntimeError, match=r"1 requests hold blocks.*a"):
        blocks.check_idle()
    blocks._free.pop()
    with pytest.raises(RuntimeError, match=r"3 held \+ 0 free != 4"):
        blocks.check()


def test_a_block_is_one_piece_of_memory() -> None:
    form = BlockFormat(num_layers=3, block_size=16, num_kv_heads=4, head_dim=64, dtype="bfloat16")
    cache = KVCache(form, [new_blocks(form, 2, torch.device("cpu"))])
    assert cache.blocks[0].is_contiguous()
    assert cache.blocks[0].numel() * 2 == form.block_bytes == 3 * 2 * 16 * 4 * 64 * 2
    assert (form.num_columns(16), form.num_columns(17)) == (1, 2)


def test_blocks_are_filled_and_copied_in_the_memory_of_each_rank() -> None:
    form = BlockFormat(num_layers=3, block_size=16, num_kv_heads=4, head_dim=64, dtype="float32", num_ranks=2)
    cache = KVCache(form, [new_blocks(form, 4, torch.device("cpu")).zero_() for _ in range(2)])
    assert sum(part[0].nbytes for part in cache.parts) == form.block_bytes
    values = torch.randn(form.shape)
    cache.fill([BlockId(1)], values)
    cache.copy(BlockId(1), BlockId(3))
    for part in cache.parts:
        assert all(torch.equal(part[block], values) for block in (1, 3))
        assert not part[0].any() and not part[2].any()


END_CALLS = st.tuples(
    st.sampled_from(["allocate", "lend", "give up", "renew", "cut", "free"]),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(0, 4),
)


@settings(max_examples=300)
@given(st.lists(END_CALLS, min_size=20, max_size=80))
def test_no_sequence_of_calls_with_two_owners_loses_a_block(calls: list[tuple[str, int, int, int]]) -> None:
    """0 and 1 lend to 2 and 3."""
    blocks = BlockManager(8)
    names = [RequestId(str(number)) for number in range(4)]
    for call, lender, borrower, index in calls:
        owner, held = names[lender % 2], blocks.held(names[lender % 2])
        block = held[index] if index < len(held) else None
        others = [name for name in names if name != owner and block in blocks.held(name)]
        if call == "allocate":
            blocks.allocate(names[lender], index)
        elif call == "free":
            blocks.free(names[lender])
        elif call == "cut" and held:
            blocks.cut(owner, index)
        elif call == "lend" and block not in (None, NO_BLOCK) and not others:
            assert blocks.lend(names[2 + borrower % 2], owner, index) == block
        elif call == "give up" and others:
            blocks.give_up(owner, index)
            assert held[index] == NO_BLOCK
        elif call == "renew" and block is not None and (others or block == NO_BLOCK) and blocks.num_free:
            old, new = blocks.renew(owner, index)
            assert old == block and held[index] == new != old
        blocks.check()
    for name in names:
        blocks.free(name)
    blocks.check_idle()
    assert blocks.num_free == 8


def test_a_block_that_two_have_is_lent_to_no_third() -> None:
    blocks = BlockManager(2)
    blocks.allocate(A, 1)
    blocks.lend(B, A, 0)
    with pytest.raises(RuntimeError, match="only owner"):
        blocks.lend(RequestId("c"), A, 0)
    assert blocks.num_free == 1
    blocks.free(A)
    assert blocks.num_free == 1
    blocks.free(B)
    assert blocks.num_free == 2
