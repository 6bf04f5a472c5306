"""Conversations on a real Redis: their items are added once, read in pieces, deleted singly, and gone in the end."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from alignedserve.store import (
    ConversationFull,
    ConversationHead,
    ConversationId,
    ConversationStore,
    NewItems,
    Part,
    ResponseGone,
    StoreFull,
    StoreLimits,
    Turn,
)
from alignedserve.store.conversation_scripts import MAX_GAPS
from alignedserve.store.records import Order
from alignedserve.store.redis_parts import PIECE_BYTES
from alignedserve.store.redis_store import RedisStore
from alignedserve.store.responses import sizes_of
from tests.store import redis_process
from tests.store.redis_process import RedisProcess
from tests.store.test_redis_responses import NOW, head, leftovers, num_bytes

ID = ConversationId("conv_1")
CONVERSATION = ConversationHead(ID, "a", NOW, b'{"x":1}')


def play(
    scenario: Callable[[ConversationStore, RedisStore], Awaitable[None]], limits: StoreLimits | None = None
) -> None:
    async def with_conversations(_: RedisProcess, store: RedisStore) -> None:
        await scenario(store.responses.conversations, store)

    redis_process.play(with_conversations, limits)


def index_of(names: Sequence[str], items: Sequence[bytes]) -> bytes:
    lines, end = [], -1
    for name, item in zip(names, items, strict=True):
        end += len(item) + 1
        lines.append(b'%d "%b"\n' % (end, name.encode()))
    return b"".join(lines)


def new(*names: str, size: int = 3) -> NewItems:
    """Items that are numbers, of `size` digits."""
    items = [b"%0*d" % (size, number) for number in range(1, len(names) + 1)]
    return NewItems([b",".join(items)], index_of(names, items))


async def append(
    conversations: ConversationStore,
    *new: NewItems,
    name: str = "",
    expires_at: int = NOW,
    limits: tuple[int, int] = (4096, 8 << 20),
) -> bool:
    name = name or secrets.token_hex(4)
    return await conversations.append(CONVERSATION, new, name, expires_at, *limits)


async def head_of(conversations: ConversationStore) -> ConversationHead:
    found = await conversations.head(ID)
    assert found
    return found


async def items_of(conversations: ConversationStore) -> bytes:
    found = await head_of(conversations)
    spans = [
        b"".join([piece async for piece in conversations.pieces(found, begin, end)])
        for begin, end in found.spans
    ]
    assert sum(map(len, spans)) + max(0, len(spans) - 1) == found.num_bytes
    return b",".join(spans)


async def names_of(conversations: ConversationStore, order: Order = "asc", limit: int = 2) -> list[bytes]:
    """The first and the last id of each page."""
    found, after, has_more = await head_of(conversations), None, True
    names: list[bytes] = []
    while has_more:
        page = await conversations.item_page(found, after, limit, order)
        assert page
        names += [name for name in (page.first_id, page.last_id) if name]
        after, has_more = page.last_id, page.has_more
    return names


def test_items_are_added_at_the_end_and_all_is_gone_when_it_is_deleted() -> None:
    async def scenario(conversations: ConversationStore, store: RedisStore) -> None:
        assert await conversations.head(ID) is None
        for _ in range(2):
            await conversations.add(CONVERSATION, new("a", "b"), NOW)
        assert await head_of(conversations) == ConversationHead(
            ID, "a", NOW, b'{"x":1}', num_items=2, spans=[(0, 7)]
        )
        assert await append(conversations, new("c"))
        assert await items_of(conversations) == b"001,002,001"
        assert await names_of(conversations) == [b'"a"', b'"b"', b'"c"', b'"c"']
        assert await names_of(conversations, "desc") == [b'"c"', b'"b"', b'"a"', b'"a"']
        before = await num_bytes(store)
        await conversations.put_state(CONVERSATION, b'{"x":12}')
        assert (await head_of(conversations)).state == b'{"x":12}'
        assert await num_bytes(store) == before + 1
        for _ in range(2):
            await conversations.delete(CONVERSATION)
        assert not await append(conversations, new("c"))
        await conversations.put_state(CONVERSATION, b"{}")
        await conversations.delete_item(CONVERSATION, b'"a"')
        with pytest.raises(ResponseGone):
            await conversations.item_page(CONVERSATION, None, 5, "asc")
        with pytest.raises(ResponseGone):
            await conversations.items(CONVERSATION, [b'"a"'])
        assert await num_bytes(store) == 0
        assert not {key for key in await leftovers(store) if "appended" not in key}

    play(scenario)


def test_an_addition_that_is_repeated_is_made_once() -> None:
    async def scenario(conversations: ConversationStore, store: RedisStore) -> None:
        await conversations.add(CONVERSATION, NewItems(), NOW)
        assert await items_of(conversations) == b"" and await names_of(conversations) == []
        for name in ("x", "y", "x"):
            assert await append(conversations, new("a"), NewItems(), new("b", "c"), name=name)
        assert await items_of(conversations) == b",".join([b"001,001,002"] * 2)
        assert await names_of(conversations, limit=3) == [b'"a"', b'"c:3"', b'"a"', b'"c:6"']

    play(scenario)


def test_large_items_are_sent_in_pieces_and_counted() -> None:
    async def scenario(conversations: ConversationStore, store: RedisStore) -> None:
        size = 3 * PIECE_BYTES
        await conversations.add(CONVERSATION, new("a", size=size), NOW)
        assert await append(conversations, new("b", size=size))
        found = await head_of(conversations)
        sizes = [len(piece) async for piece in conversations.pieces(found, *found.spans[0])]
        assert max(sizes) == PIECE_BYTES and sum(sizes) == 2 * size + 1
        assert await num_bytes(store) > 2 * size
        assert not {key for key in await leftovers(store) if "staged" in key}
        with pytest.raises(StoreFull):
            await append(conversations, new("c", size=size))
        with pytest.raises(StoreFull):
            await conversations.add(replace_id(CONVERSATION), new("c", size=size), NOW)
        await conversations.delete(CONVERSATION)
        assert await num_bytes(store) == 0

    play(scenario, StoreLimits(2_000_000))


def replace_id(found: ConversationHead) -> ConversationHead:
    return ConversationHead(ConversationId("conv_2"), found.owner, found.created_at, found.state)


def test_a_deleted_item_is_in_no_page_and_not_read() -> None:
    async def scenario(conversations: ConversationStore, store: RedisStore) -> None:
        await conversations.add(CONVERSATION, new("a", "b", "c", "b", "d"), NOW)
        before = await num_bytes(store)
        for _ in range(2):
            await conversations.delete_item(CONVERSATION, b'"b"')
        found = await head_of(conversations)
        assert (found.num_items, found.layout) == (3, 0) and len(found.spans) == 3
        assert await items_of(conversations) == b"001,003,005"
        assert await names_of(conversations) == [b'"a"', b'"c"', b'"d"', b'"d"']
        names = [b'"d"', b'"b"', b'"c"', b'"x"']
        assert await conversations.items(found, names) == [(16, 19), None, (8, 11), None]
        assert await conversations.item_page(found, b'"b"', 5, "asc") is None
        # what is added goes on behind the gaps
        assert await append(conversations, new("e"))
        assert await items_of(conversations) == b"001,003,005,001"
        # less than a half is left: all is written anew
        await conversations.delete_item(CONVERSATION, b'"a"')
        now = await head_of(conversations)
        assert (now.layout, now.spans) == (1, [(0, 11)]) and await num_bytes(store) < before
        assert await items_of(conversations) == b"003,005,001"
        for look in (conversations.item_page(found, None, 5, "asc"), conversations.items(found, [b'"d"'])):
            with pytest.raises(ResponseGone):
                await look
        with pytest.raises(ResponseGone):
            assert [piece async for piece in conversations.pieces(found, *found.spans[0])]
        for name in (b'"c"', b'"d"', b'"e"'):
            await conversations.delete_item(CONVERSATION, name)
        assert await items_of(conversations) == b""
        await append(conversations, new("f"))
        assert await items_of(conversations) == b"001"
        await conversations.delete(CONVERSATION)
        assert await num_bytes(store) == 0
        assert not {key for key in await leftovers(store) if "appended" not in key}

    play(scenario)


def test_there_are_few_gaps() -> None:
    async def scenario(conversations: ConversationStore, store: RedisStore) -> None:
        names = [f"n{number}" for number in range(4 * MAX_GAPS)]
        await conversations.add(CONVERSATION, new(*names), NOW)
        gaps = []
        for name in names[::3]:
            await conversations.delete_item(CONVERSATION, b'"%b"' % name.encode())
            gaps.append(len((await head_of(conversations)).spans))
        assert max(gaps) <= MAX_GAPS and (await head_of(conversations)).layout == len(names[::3]) // MAX_GAPS
        left = [number for number in range(len(names)) if number % 3]
        assert await items_of(conversations) == b",".join(b"%03d" % (number + 1) for number in left)

    play(scenario)


def test_a_conversation_has_a_size() -> None:
    async def scenario(conversations: ConversationStore, store: RedisStore) -> None:
        await conversations.add(CONVERSATION, new("a", "b"), NOW)
        for limits in ((2, 100), (9, 9)):
            with pytest.raises(ConversationFull):
                await append(conversations, new("c"), limits=limits)
        # gaps count for neither
        await conversations.delete_item(CONVERSATION, b'"a"')
        await append(conversations, new("c"), limits=(2, 9))
        assert await items_of(conversations) == b"002,001"

    play(scenario)


def test_it_expires_after_its_last_addition() -> None:
    async def scenario(conversations: ConversationStore, store: RedisStore) -> None:
        await conversations.add(CONVERSATION, new("a"), NOW + 1)
        await append(conversations, new("b"), expires_at=NOW + 3)
        await conversations.drop_expired(NOW + 2)
        assert await items_of(conversations) == b"001,001"
        await conversations.drop_expired(NOW + 3)
        assert await conversations.head(ID) is None and await num_bytes(store) == 0

    play(scenario)


# ---- turns of responses ----

OUTPUT = [b'{"o":[],"p":1}', b'{"q":2}']
TURN_PARTS: dict[Part, Any] = {
    "input_items": [b'{"i":1},{"j":2}'],
    "item_index": [b'7 "i"\n15 "j"\n'],
    "output": [b",".join(OUTPUT).replace(b"[]", b"[123]")],
}
TURN = Turn(ID, index_of("oq", OUTPUT), [(0, 6), (9, 25)], NOW + 9, 4096, 1000)
SAID = b'{"i":1},{"j":2},' + b",".join(OUTPUT)


def ended() -> Any:
    return replace(head(1), num_bytes=sizes_of(TURN_PARTS), conversation_id=ID)


@pytest.mark.parametrize("junk", [b"", b"x" * 2 * PIECE_BYTES])
def test_a_response_that_is_added_adds_its_turn_once(junk: bytes) -> None:
    async def scenario(conversations: ConversationStore, store: RedisStore) -> None:
        await conversations.add(CONVERSATION, new("a"), NOW)
        items = [b'{"i":1},{"%b":2}' % junk]
        index = [b'7 "i"\n%d "j"\n' % len(items[0])]
        large = Turn(ID, TURN.output_index, TURN.output_spans, NOW + 9, 4096, 1 << 20)
        for _ in range(2):
            await store.responses.add(
                ended(), {**TURN_PARTS, "input_items": items, "item_index": index}, large
            )
        said = items[0] + b"," + b",".join(OUTPUT)
        assert await items_of(conversations) == b"001," + said
        assert await names_of(conversations, limit=1) == [b'"%c"' % name for name in b"aaiijjooqq"]
        found = await head_of(conversations)
        assert found.num_items == 5 and found.spans == [(0, 4 + len(said))]
        await conversations.drop_expired(NOW + 8)
        # each is there without the other
        await store.responses.delete(ended())
        assert await items_of(conversations) == b"001," + said
        await conversations.delete(CONVERSATION)
        assert await num_bytes(store) == 0 and await leftovers(store) == set()

    play(scenario)


def test_a_response_that_ends_adds_its_turn_once() -> None:
    async def scenario(conversations: ConversationStore, store: RedisStore) -> None:
        await conversations.add(CONVERSATION, NewItems(), NOW)
        responses = store.responses
        begun = replace(ended(), status="queued")
        output: dict[Part, Any] = {"output": TURN_PARTS["output"]}
        await responses.add(begun, {**TURN_PARTS, "output": [], "call": [b"{}"]})
        assert await items_of(conversations) == b""
        (lease,) = await responses.take("me", 60, 1, 9)
        assert await responses.replace(begun, ended(), lease, parts=output, turn=TURN)
        assert not await responses.replace(begun, ended(), None, parts=output, turn=TURN)
        assert await items_of(conversations) == SAID
        await responses.delete(ended())
        await conversations.delete(CONVERSATION)
        assert await num_bytes(store) == 0 and await leftovers(store) == set()

    play(scenario)


def test_a_turn_of_a_conversation_that_is_gone_is_left_out() -> None:
    async def scenario(conversations: ConversationStore, store: RedisStore) -> None:
        await store.responses.add(ended(), TURN_PARTS, TURN)
        assert await conversations.head(ID) is None and await store.responses.head(ended().id)
        await store.responses.delete(ended())
        assert await num_bytes(store) == 0 and await leftovers(store) == set()

    play(scenario)


@pytest.mark.parametrize(("max_items", "max_bytes"), [(4, 1000), (4096, 39)])
def test_a_turn_that_is_too_large_changes_nothing(max_items: int, max_bytes: int) -> None:
    async def scenario(conversations: ConversationStore, store: RedisStore) -> None:
        await conversations.add(CONVERSATION, new("a"), NOW)
        begun = replace(ended(), status="queued")
        large = Turn(ID, TURN.output_index, TURN.output_spans, NOW, max_items, max_bytes)
        with pytest.raises(ConversationFull):
            await store.responses.add(ended(), TURN_PARTS, large)
        await store.responses.add(begun, TURN_PARTS)
        with pytest.raises(ConversationFull):
            await store.responses.replace(begun, ended(), None, parts={}, turn=large)
        assert await store.responses.head(begun.id) == begun
        assert await items_of(conversations) == b"001"

    play(scenario)


def test_a_turn_counts_as_what_is_stored() -> None:
    async def scenario(conversations: ConversationStore, store: RedisStore) -> None:
        await conversations.add(CONVERSATION, NewItems(), NOW)
        large = {**TURN_PARTS, "input_items": [b"x" * 600]}
        await store.responses.add(ended(), large)
        await store.responses.delete(ended())
        with pytest.raises(StoreFull):
            await store.responses.add(ended(), large, TURN)

    play(scenario, StoreLimits(1100))
