from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.instance.memory import BlockManager
from alignedserve.kv.held import NO_BLOCK, Held
from alignedserve.kv.span import KvSpan
from alignedserve.types import BlockId


def made(count: int) -> list[Held]:
    return [Held() for _ in range(count)]


def allocate(memory: BlockManager, held: Held, count: int) -> bool:
    """Gives the owner so many more columns."""
    return memory.grow(held, held.num_columns + count)


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 6), st.sampled_from(["reserve", "settle", "free"])),
        max_size=60,
    )
)
def test_no_sequence_of_calls_loses_or_doubles_a_block(calls: list[tuple[int, int, str]]) -> None:
    memory, owners = BlockManager(10), made(4)
    for number, count, call in calls:
        held, before = owners[number], memory.num_free
        num_blocks = held.num_blocks
        if call == "free":
            memory.free(held)
            assert memory.num_free == before + num_blocks
        elif call == "settle":
            memory.settle()
            assert memory.num_free == before and len(held.blocks) == num_blocks
        else:
            fits = memory.reserve(held, held.num_columns + count)
            assert fits == (count <= before)
            assert memory.num_free == before - (count if fits else 0)
        memory.check()
    for held in owners:
        memory.free(held)
    memory.check_owners([])
    assert memory.num_free == 10


def test_what_is_promised_comes_with_the_end_of_the_plan() -> None:
    """In the order of the promises, and after all who share have found what they share."""
    memory, (first, second, third) = BlockManager(6), made(3)
    memory.grow(first, 3)
    memory.publish(first, 0, [b"1", b"12", b"123"])
    memory.free(first)
    assert memory.reserve(second, 5) and not memory.reserve(first, 2)
    assert (memory.num_free, memory.num_kept, second.blocks) == (1, 3, [])
    # Two of the three that are kept would have gone to the second.
    assert memory.share(third, [b"1"]) == 1
    assert (memory.num_free, memory.num_kept) == (0, 2)
    memory.check_owners([second, third])
    memory.settle()
    assert third.blocks == [0] and second.blocks == [1, 2, 3, 4, 5]
    memory.check_owners([second, third])


def test_who_leaves_within_a_plan_gets_nothing() -> None:
    memory, (gone, other) = BlockManager(4), made(2)
    memory.grow(gone, 1)
    assert memory.reserve(gone, 4) and not memory.reserve(other, 1)
    memory.free(gone)
    assert memory.num_free == 4 and memory.reserve(other, 4)
    memory.settle()
    assert len(other.blocks) == 4 and gone.groups == []
    memory.check_owners([other])


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
    blocks, owners = BlockManager(10, counts_once=counts_once), {name: Held() for name in OWNERS}
    # what is in each block: who wrote it, and how many blocks into its prompt that is
    content: dict[BlockId, bytes] = {}
    for call, name, count in calls:
        held, before = owners[name], blocks.num_free
        # a and b begin alike, c and d as well
        prompt = [bytes([OWNERS.index(name) // 2, position]) for position in range(8)]
        num_held = len(held.blocks)
        if call == "free":
            num_left = blocks.num_shared(held)
            blocks.free(held)
            assert blocks.num_free == before + num_held - num_left
        elif call == "share":
            if not held.groups:
                num_already = blocks.num_held(prompt[:count])
                num_shared = blocks.share(held, prompt[:count])
                assert [content[block] for block in held.blocks] == prompt[:num_shared]
                assert blocks.num_free == before - num_shared + num_already
                assert blocks.num_shared(held) == num_already
        elif call == "name":
            if held.groups:
                blocks.publish(held, 0, prompt[: min(count, num_held)])
        elif call == "forget":
            blocks.forget_all()
            assert blocks.num_known(prompt) == 0
            assert blocks.num_free == before
        else:
            count = min(count, 8 - num_held)
            assert allocate(blocks, held, count) == (count <= before)
            found = held.blocks[num_held:]
            others = {block for other in OWNERS if other != name for block in owners[other].blocks}
            assert not others & set(found)
            content |= dict(zip(found, prompt[num_held:], strict=False))
            assert blocks.num_free == before - len(found)
        assert blocks.num_free >= 0
        blocks.check()
    for held in owners.values():
        blocks.free(held)
    blocks.check_owners([])
    assert blocks.num_free == 10


def test_what_was_kept_is_taken_last_and_its_end_before_its_beginning() -> None:
    blocks, (a, b) = BlockManager(6), made(2)
    block_hashes = [b"1", b"12", b"123"]
    allocate(blocks, a, 3)
    blocks.publish(a, 0, block_hashes)
    blocks.free(a)
    assert (blocks.num_free, blocks.num_kept) == (6, 3)
    allocate(blocks, b, 4)
    assert (blocks.num_free, blocks.num_kept) == (2, 2)
    assert blocks.share(a, block_hashes) == 2
    assert (blocks.num_free, blocks.num_kept) == (0, 0)
    blocks.check()


def test_a_shared_block_counts_for_each_owner() -> None:
    blocks, (a, b) = BlockManager(6), made(2)
    allocate(blocks, a, 2)
    blocks.publish(a, 0, [b"1", b"12"])
    assert blocks.share(b, [b"1", b"12", b"123"]) == 2
    assert blocks.num_free == 2 and not allocate(blocks, b, 3)
    blocks.free(a)
    assert (blocks.num_free, blocks.num_kept) == (4, 0)
    blocks.free(b)
    assert (blocks.num_free, blocks.num_kept) == (6, 2)
    blocks.check_owners([])


def test_a_shared_block_counts_once_if_it_is_to() -> None:
    blocks, (a, b) = BlockManager(6, counts_once=True), made(2)
    allocate(blocks, a, 2)
    blocks.publish(a, 0, [b"1", b"12"])
    assert blocks.num_held([b"1", b"12", b"123"]) == 2
    assert blocks.share(b, [b"1", b"12", b"123"]) == 2
    assert (blocks.num_free, blocks.num_shared(a), blocks.num_repeated) == (4, 2, 2)
    assert allocate(blocks, b, 4)
    blocks.free(a)
    assert (blocks.num_free, blocks.num_shared(b), blocks.num_repeated) == (0, 0, 0)
    blocks.check()
    blocks.free(b)
    assert (blocks.num_free, blocks.num_kept) == (6, 2)
    assert blocks.num_held([b"1"]) == 0, "it would be in use again"
    blocks.check_owners([])


def test_what_is_read_once_is_divided_among_its_owners() -> None:
    """A and B have four blocks in common, and C two of them."""
    blocks, (a, b, c) = BlockManager(20, counts_once=True), made(3)
    hashes = [bytes([number]) for number in range(6)]
    allocate(blocks, a, 6)
    blocks.publish(a, 0, hashes)
    assert blocks.num_read_by_others(a) == blocks.num_read_by_others(b) == 0
    assert (blocks.share(b, hashes[:4]), blocks.share(c, hashes[:2])) == (4, 2)
    allocate(blocks, b, 1)
    allocate(blocks, c, 1)
    shares = [blocks.num_read_by_others(owner) for owner in (a, b, c)]
    assert shares == pytest.approx([2 * 2 / 3 + 2 / 2, 2 * 2 / 3 + 2 / 2, 2 * 2 / 3])
    assert sum(shares) == pytest.approx(blocks.num_repeated)
    blocks.free(b)
    assert (blocks.num_read_by_others(a), blocks.num_read_by_others(c)) == (1, 1)


def test_with_a_window_each_owner_counts() -> None:
    blocks, (a, b) = BlockManager(20, SPAN, counts_once=True), made(2)
    blocks.grow(a, 8)
    blocks.publish(a, 0, PROMPT[:8])
    assert blocks.num_held(PROMPT[:8]) == 0
    assert blocks.share(b, PROMPT) == 8 and blocks.num_shared(a) == 0
    assert blocks.num_free == 20 - 8 - 2
    blocks.check()


def test_behind_what_arrives_the_window_is_that_of_all_of_it() -> None:
    blocks, (a, b) = with_window(45, MIXED), made(2)
    blocks.grow(a, 8)
    blocks.publish(a, 0, PROMPT[:3])
    # With KV of more columns elsewhere, those before the sixth need no blocks of the sliding group.
    assert [blocks.num_known(PROMPT[:8], num_passed) for num_passed in (0, 6)] == [3, 3]
    blocks.free_passed(a, 6)
    blocks.publish(a, 3, PROMPT[3:8])
    blocks.forget_all()
    blocks.publish(a, 0, PROMPT[:8])
    assert [blocks.num_known(PROMPT[:8], num_passed) for num_passed in (0, 1, 6)] == [0, 1, 8]
    assert blocks.share(b, PROMPT[:4], 6) == 4
    assert (b.groups[0], b.groups[2]) == (a.groups[0][:4], [NO_BLOCK] * 6)
    assert blocks.grow(b, 8, 6)
    assert [len(b.groups[group]) for group in range(3)] == [8, 8, 8]
    assert not {*b.groups[0][4:]} & {*a.groups[0]}
    blocks.check()


def test_a_name_is_one_blocks() -> None:
    blocks, (a, b) = BlockManager(4), made(2)
    for owner in (a, b):
        allocate(blocks, owner, 1)
        blocks.publish(owner, 0, [b"1"])
    blocks.free(a)
    blocks.free(b)
    assert (blocks.num_free, blocks.num_kept) == (4, 1)


def test_who_has_blocks_can_not_share() -> None:
    blocks, a = BlockManager(2), Held()
    allocate(blocks, a, 1)
    with pytest.raises(RuntimeError, match="1 blocks are held before any are shared"):
        blocks.share(a, [b"1"])


# ---- blocks behind a window: of 2 tokens in blocks of 32, the tile of 64 tokens that it begins in is needed too ----

SPAN = KvSpan(32, 2)
# Two groups of layers that attend to all tokens, and one with the window.
MIXED = KvSpan(32, 2, num_full_groups=2, num_sliding_groups=1)
PROMPT = [bytes([position]) for position in range(9)]


def with_window(num_blocks: int, span: KvSpan = SPAN) -> BlockManager:
    return BlockManager(num_blocks, span)


def test_what_is_passed_is_free_and_keeps_its_place() -> None:
    blocks, a = with_window(6), Held()
    assert blocks.grow(a, 5) and a.blocks == [0, 1, 2, 3, 4]
    blocks.free_passed(a, 2)
    assert a.blocks == [NO_BLOCK, NO_BLOCK, 2, 3, 4] and blocks.num_free == 3
    blocks.check()
    blocks.free_passed(a, 4)
    assert blocks.grow(a, 10) and blocks.num_free == 0
    blocks.check()
    blocks.free(a)
    blocks.check_owners([])
    assert blocks.num_free == 6


def test_groups_hold_a_block_of_each_column_side_by_side() -> None:
    blocks, (a, b) = with_window(12, MIXED), made(2)
    assert blocks.grow(a, 3) and a.groups == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert blocks.in_columns(a, 1, 3) == [3, 4, 5, 6, 7, 8]
    assert blocks.num_missing(a, 5) == 6 and not blocks.grow(a, 5)
    assert blocks.num_free == 3
    blocks.free_passed(a, 2)
    assert a.groups == [[0, 3, 6], [1, 4, 7], [NO_BLOCK, NO_BLOCK, 8]]
    assert blocks.in_columns(a, 1, 2) == [3, 4, NO_BLOCK]
    assert blocks.num_free == 5
    blocks.check()
    # One that comes from elsewhere has passed its first columns.
    assert blocks.grow(b, 2, num_passed=1)
    assert [*map(len, b.groups)] == [2, 2, 2] and b.groups[2][0] == NO_BLOCK and b.num_blocks == 5
    blocks.check()
    for owner in (a, b):
        blocks.free(owner)
    blocks.check_owners([])
    assert blocks.num_free == 12


def test_sliding_groups_wait_for_columns_to_be_passed() -> None:
    span = KvSpan(32, 2, max_step=32, num_full_groups=1, num_sliding_groups=1)
    assert span.most == 4
    blocks, a = with_window(14, span), Held()
    assert blocks.grow(a, 10)
    assert [*map(len, a.groups)] == [10, 4] and a.end == 4 and blocks.num_free == 0
    blocks.free_passed(a, 3)
    assert blocks.num_free == 0
    blocks.settle()
    assert [*map(len, a.groups)] == [10, 7] and blocks.num_free == 0
    blocks.free_passed(a, 7)
    blocks.settle()
    # Nothing is after the tenth.
    assert [*map(len, a.groups)] == [10, 10] and blocks.num_free == 1
    blocks.check()
    blocks.free(a)
    blocks.check_owners([])


def test_a_prefix_is_known_if_what_is_seen_behind_it_is_there() -> None:
    blocks, (a, b) = with_window(9), made(2)
    blocks.grow(a, 8)
    # After 7 blocks the next token sees the last of them, and the tile begins with the one before.
    assert SPAN.num_passed(7 * 32) == 6 and SPAN.num_passed(8 * 32) == 6
    blocks.free_passed(a, 6)
    blocks.publish(a, 0, PROMPT[:8])
    assert [blocks.num_known(PROMPT[:count]) for count in range(10)] == [0, 0, 0, 0, 0, 0, 0, 7, 8, 8]
    assert blocks.share(b, PROMPT) == 8
    assert b.blocks == [NO_BLOCK] * 6 + a.blocks[6:]
    # A block counts once for each of its owners.
    assert blocks.num_free == 9 - 2 - 2
    blocks.check()
    for owner in (a, b):
        blocks.free(owner)
    blocks.check_owners([])
    assert blocks.num_kept == 2
    assert blocks.grow(a, 8) and blocks.num_known(PROMPT) == 7


def test_of_a_prefix_full_groups_need_all() -> None:
    blocks, (a, b) = with_window(45, MIXED), made(2)
    blocks.grow(a, 8)
    blocks.publish(a, 0, PROMPT[:3])
    blocks.free_passed(a, 6)
    blocks.publish(a, 3, PROMPT[3:8])
    # Of the columns before the fourth all groups have been published, of others those that A holds still.
    assert [blocks.num_known(PROMPT[:count]) for count in range(10)] == [0, 1, 2, 3, 3, 3, 3, 7, 8, 8]
    assert blocks.share(b, PROMPT) == 8
    assert b.groups[0] == a.groups[0] and b.groups[2] == [NO_BLOCK] * 6 + a.groups[2][6:]
    assert blocks.num_free == 45 - 2 * 18
    blocks.check()
    for owner in (a, b):
        blocks.free(owner)
    blocks.check_owners([])
    # What was passed was kept first, and is taken first; then comes the last column.
    allocate(blocks, a, (45 - blocks.num_kept + 3) // 3)
    assert blocks.num_known(PROMPT) == 8
    allocate(blocks, a, 1)
    assert blocks.num_known(PROMPT) == 7


def test_what_was_passed_is_kept_for_others() -> None:
    blocks, (a, b) = with_window(9), made(2)
    blocks.grow(a, 6)
    blocks.publish(a, 0, PROMPT[:6])
    blocks.free_passed(a, 4)
    assert (blocks.num_free, blocks.num_kept) == (7, 4)
    assert blocks.share(b, PROMPT[:3]) == 3
    assert NO_BLOCK in b.blocks and len(b.blocks) == 3
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
    blocks, owners = with_window(30, span), {name: Held() for name in OWNERS}
    # What is in each block: its group, and the prompt up to its end.
    content: dict[BlockId, tuple[int, bytes]] = {}
    for call, name, count in calls:
        owner, before = owners[name], blocks.num_free
        prompt = [bytes([OWNERS.index(name) // 2, position]) for position in range(9)]
        held = _groups_of(owner, span)
        if call == "free":
            blocks.free(owner)
            assert blocks.num_free == before + sum(block != NO_BLOCK for each in held for block in each)
        elif call == "grow":
            missing = blocks.num_missing(owner, max(count, owner.num_columns))
            assert blocks.grow(owner, count) == (missing <= before)
            assert blocks.num_free == before - (missing if missing <= before else 0)
        elif call == "share" and not owner.groups:
            if num_shared := blocks.share(owner, prompt[:count]):
                assert owner.num_passed == span.num_passed(num_shared * 32)
                held = _groups_of(owner, span)
                assert before - blocks.num_free == span.num_held(num_shared * 32, num_shared * 32)
        elif call == "pass" and held[-1]:
            blocks.free_passed(owner, max(owner.num_passed, min(count, len(held[-1]))))
            assert blocks.num_free >= before
            blocks.settle()
        elif call == "publish":
            if owner.groups:
                blocks.publish(owner, 0, prompt[: min(count, *map(len, held))])
        elif call == "forget":
            blocks.forget_all()
            assert blocks.num_free == before
        for group, (then, now) in enumerate(zip(held, _groups_of(owner, span), strict=True)):
            content |= {now[column]: (group, prompt[column]) for column in range(len(then), len(now))}
            num_passed = owner.num_passed if group >= groups[0] else 0
            for column, block in enumerate(now):
                assert (block == NO_BLOCK) == (column < num_passed)
                assert block == NO_BLOCK or content[block] == (group, prompt[column])
        blocks.check()
    for owner in owners.values():
        blocks.free(owner)
    blocks.check_owners([])


def _groups_of(held: Held, span: KvSpan) -> list[list[BlockId]]:
    return [[*each] for each in held.groups] or [[] for _ in range(span.num_groups)]


def test_leaks_are_told_with_both_numbers() -> None:
    blocks, a = BlockManager(4), Held()
    allocate(blocks, a, 3)
    with pytest.raises(RuntimeError, match=r"1 owners hold blocks, and 0 are to hold some"):
        blocks.check_owners([])
    a.num_blocks = 2
    with pytest.raises(RuntimeError, match=r"an owner of 3 blocks counts 2"):
        blocks.check()
    a.num_blocks = 3
    blocks._free.pop()
    with pytest.raises(RuntimeError, match=r"3 held \+ 0 free != 4"):
        blocks.check()


def test_a_promise_that_is_counted_wrongly_is_told() -> None:
    blocks, a = BlockManager(4), Held()
    blocks.reserve(a, 2)
    blocks._num_promised = 1
    with pytest.raises(RuntimeError, match="1 blocks are counted as promised, and 2 are"):
        blocks.check()


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
    blocks, owners = BlockManager(8), made(4)
    for call, lender, borrower, index in calls:
        owner = owners[lender % 2]
        held = owner.blocks
        block = held[index] if index < len(held) else None
        others = [each for each in owners if each is not owner and block in each.blocks]
        if call == "allocate":
            allocate(blocks, owners[lender], index)
        elif call == "free":
            blocks.free(owners[lender])
        elif call == "cut" and held:
            blocks.cut(owner, min(index, len(held)))
        elif call == "lend" and block not in (None, NO_BLOCK) and not others:
            blocks.lend(owners[2 + borrower % 2], owner, index)
            assert owners[2 + borrower % 2].blocks[-1] == block
        elif call == "give up" and others:
            blocks.give_up(owner, index)
            assert held[index] == NO_BLOCK
        elif call == "renew" and block is not None and (others or block == NO_BLOCK) and blocks.num_free:
            old, new = blocks.renew(owner, index)
            assert old == block and held[index] == new != old
        blocks.check()
    for owner in owners:
        blocks.free(owner)
    blocks.check_owners([])
    assert blocks.num_free == 8


def test_a_block_that_two_have_is_lent_to_no_third() -> None:
    blocks, (a, b) = BlockManager(2), made(2)
    allocate(blocks, a, 1)
    blocks.lend(b, a, 0)
    with pytest.raises(RuntimeError, match="only owner"):
        blocks.lend(Held(), a, 0)
    assert blocks.num_free == 1
    blocks.free(a)
    assert blocks.num_free == 1
    blocks.free(b)
    assert blocks.num_free == 2
