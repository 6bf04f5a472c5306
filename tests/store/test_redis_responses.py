"""Responses on a real Redis: stored, replaced by their holder, counted, and finally gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from msgspec.structs import replace

from alignedserve.store import (
    LeaseLost,
    Part,
    ResponseGone,
    ResponseHead,
    ResponseId,
    StoreAway,
    StoreFull,
    StoreLimits,
    TooManyJobs,
)
from alignedserve.store.records import Order
from alignedserve.store.redis_connection import RedisConnection
from alignedserve.store.redis_parts import PIECE_BYTES
from alignedserve.store.redis_responses import RedisResponses
from alignedserve.store.redis_store import RedisStore
from alignedserve.store.response_scripts import ADD
from alignedserve.store.responses import ItemPage, ResponseStore, sizes_of
from tests.store import redis_process
from tests.store.redis_process import RedisProcess

NOW = 1_000_000


PARTS: dict[Part, list[bytes]] = {
    "input_items": [b"{}"],
    "item_index": [b'2 "a"\n'],
    "repeated": [b'{"y":2}'],
}


def head(
    number: int, status: str = "completed", owner: str = "a", expires_at: int = NOW + 100
) -> ResponseHead:
    return ResponseHead(
        id=ResponseId(f"resp_{number}"),
        owner=owner,
        status=status,  # type: ignore[arg-type]
        created_at=NOW + number,
        expires_at=expires_at,
        num_bytes=sizes_of(PARTS),
        state=b'{"x": 1}',
    )


async def read(responses: ResponseStore, found: ResponseHead, part: Part, *span: int) -> bytes:
    return b"".join([piece async for piece in responses.pieces(found, part, *span)])


def play(
    scenario: Callable[[ResponseStore, RedisStore], Awaitable[None]], limits: StoreLimits | None = None
) -> None:
    async def with_responses(_: RedisProcess, store: RedisStore) -> None:
        await scenario(store.responses, store)

    redis_process.play(with_responses, limits)


async def num_bytes(store: RedisStore) -> int:
    return int(await store._redis.get("alignedserve:bytes") or 0)


async def leftovers(store: RedisStore) -> set[str]:
    """The names of all keys that hold more than a count."""
    keys = {key.decode() for key in await store._redis.keys("alignedserve:*")}
    return {key for key in keys if not key.startswith(("alignedserve:bytes", "alignedserve:sequence"))}


def test_what_is_added_is_there_until_it_is_deleted() -> None:
    async def scenario(responses: ResponseStore, store: RedisStore) -> None:
        for _ in range(2):
            await responses.add(head(1), PARTS)
        assert await responses.head(ResponseId("resp_1")) == head(1)
        assert await responses.head(ResponseId("resp_2")) is None
        assert await read(responses, head(1), "repeated") == b'{"y":2}'
        assert await num_bytes(store) > 0 and await responses.take("me", 5, 10, 9) == []
        for _ in range(2):
            await responses.delete(head(1))
        with pytest.raises(ResponseGone):
            await read(responses, head(1), "repeated")
        assert await num_bytes(store) == 0 and await leftovers(store) == set()

    play(scenario)


def test_a_large_part_is_moved_in_pieces_and_counted_as_one() -> None:
    async def scenario(responses: ResponseStore, store: RedisStore) -> None:
        whole = bytes(range(256)) * 4000
        pieces = [whole[:7], bytearray(whole[7:200_000]), memoryview(whole)[200_000:]]
        parts: dict[Part, Any] = {**PARTS, "output": pieces}
        large = replace(head(1), num_bytes=sizes_of(parts))
        await responses.add(large, parts)
        assert await read(responses, large, "output") == whole
        assert await read(responses, large, "output", 5, 600_000) == whole[5:600_000]
        sizes = [len(piece) async for piece in responses.pieces(large, "output")]
        assert max(sizes) == PIECE_BYTES
        assert await num_bytes(store) > sum(large.num_bytes.values())
        await responses.delete(large)
        assert await num_bytes(store) == 0 and await leftovers(store) == set()

    play(scenario)


def test_a_page_of_items_has_no_more_than_was_asked_for() -> None:
    async def scenario(responses: ResponseStore, store: RedisStore) -> None:
        index = b'4 "a"\n9 "b\\n"\n20 "c"\n'
        await responses.add(head(1), {**PARTS, "item_index": [index]})
        name = ResponseId("resp_1")
        assert await responses.item_page(name, None, 2, "asc") == ItemPage(
            [(0, 4), (5, 9)], b'"a"', b'"b\\n"', True
        )
        assert await responses.item_page(name, b'"b\\n"', 2, "asc") == ItemPage(
            [(10, 20)], b'"c"', b'"c"', False
        )
        assert await responses.item_page(name, None, 1, "desc") == ItemPage([(10, 20)], b'"c"', b'"c"', True)
        assert await responses.item_page(name, b'"b\\n"', 5, "desc") == ItemPage(
            [(0, 4)], b'"a"', b'"a"', False
        )
        assert await responses.item_page(name, b'"a"', 5, "desc") == ItemPage([], None, None, False)
        assert await responses.item_page(name, b'"d"', 5, "asc") is None
        with pytest.raises(ResponseGone):
            await responses.item_page(ResponseId("resp_2"), None, 5, "asc")
        assert await responses.items(name, [b'"c"', b'"d"', b'"a"']) == [(10, 20), None, (0, 4)]
        with pytest.raises(ResponseGone):
            await responses.items(ResponseId("resp_2"), [b'"a"'])

    play(scenario)


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_pages_of_items_with_equal_ids_have_each_of_them_once(order: Order) -> None:
    """References have the ids of their items."""

    async def scenario(responses: ResponseStore, store: RedisStore) -> None:
        names = [b'"a"', b'"b"', b'"a"', b'"a:3"', b'"a"', b'"c"']
        spans = [(10 * number, 10 * number + 9) for number in range(len(names))]
        index = b"".join(b"%d %b\n" % (end, name) for (_, end), name in zip(spans, names, strict=True))
        await responses.add(head(1), {**PARTS, "item_index": [index]})
        found: list[tuple[int, int]] = []
        after, has_more = None, True
        while has_more:
            page = await responses.item_page(ResponseId("resp_1"), after, 1, order)
            assert page
            found += page.spans
            after, has_more = page.last_id, page.has_more
        assert found == (spans if order == "asc" else spans[::-1])
        # clients that know ids only come to an end
        page = await responses.item_page(ResponseId("resp_1"), b'"a"', 9, order)
        assert page and page.spans == (spans[5:] if order == "asc" else [])

    play(scenario)


def test_one_that_is_not_over_is_somebodys() -> None:
    async def scenario(responses: ResponseStore, store: RedisStore) -> None:
        parts: dict[Part, Any] = {**PARTS, "call": [b"{}"]}
        for number in (2, 1):
            await responses.add(head(number, "queued"), parts)
        (first,) = await responses.take("me", 60, 1, 9)
        assert first.id == "resp_1"
        (second,) = await responses.take("you", 60, 5, 9)
        assert second.id == "resp_2" and await responses.take("you", 60, 5, 9) == []
        assert await responses.renew([first, second], 60) == ["held", "held"]
        begun = replace(head(1, "queued"), state=b'{"x": 2}')
        assert await responses.replace(head(1, "queued"), begun, first)
        assert not await responses.replace(head(1, "queued"), begun, first)
        with pytest.raises(LeaseLost):
            await responses.replace(begun, head(1), second)
        large: dict[Part, Any] = {"output": [b"x" * 2 * PIECE_BYTES]}
        over = replace(head(1), num_bytes=sizes_of(large))
        # what is refused leaves nothing
        assert not await responses.replace(head(1, "queued"), over, first, parts=large)
        assert await responses.replace(begun, over, first, parts=large)
        assert len(await read(responses, over, "output")) == 2 * PIECE_BYTES
        assert not {key for key in await leftovers(store) if "staged" in key or ":resp_1:call" in key}
        assert await responses.renew([first], 60) == ["lost"]
        with pytest.raises(LeaseLost):
            await responses.begin(first)
        # somebody else may end it too: it is cancelled
        assert await responses.replace(head(2, "queued"), head(2), None)
        assert await responses.renew([second], 60) == ["lost"]
        for number in (1, 2):
            await responses.delete(head(number))
        assert await num_bytes(store) == 0 and await leftovers(store) == set()

    play(scenario)


def test_owners_have_turns() -> None:
    async def scenario(responses: ResponseStore, store: RedisStore) -> None:
        for number in range(5):
            await responses.add(head(number, "queued"), PARTS)
        assert [each.id for each in await responses.take("me", 60, 2, 9)] == ["resp_0", "resp_1"]
        await responses.add(head(5, "queued", owner="b"), PARTS)
        await responses.add(head(6, "queued", owner="b"), PARTS)
        taken = [(await responses.take("me", 60, 1, 9))[0].id for _ in range(5)]
        assert taken == ["resp_5", "resp_2", "resp_6", "resp_3", "resp_4"]

    play(scenario)


def test_an_owner_has_a_share_of_a_holders_places() -> None:
    async def scenario(responses: ResponseStore, store: RedisStore) -> None:
        for number in range(5):
            await responses.add(head(number, "queued"), PARTS)
        first = await responses.take("me", 60, 4, 2)
        assert [each.id for each in first] == ["resp_0", "resp_1"]
        assert await responses.take("me", 60, 4, 2) == []
        await responses.add(head(5, "queued", owner="b"), PARTS)
        assert [each.id for each in await responses.take("me", 60, 4, 2)] == ["resp_5"]
        # another gateway has places of its own
        assert [each.id for each in await responses.take("you", 60, 1, 2)] == ["resp_2"]
        await responses.release(first[0])
        assert [each.id for each in await responses.take("me", 60, 4, 2)] == ["resp_0"]
        # where no keys are needed, all are one owner
        for number in range(6, 10):
            await responses.add(head(number, "queued", owner=""), PARTS)
        assert len(await responses.take("me", 60, 4, 2)) == 4

    play(scenario)


def test_a_lease_lapses_and_how_often_is_known() -> None:
    async def scenario(responses: ResponseStore, store: RedisStore) -> None:
        await responses.add(head(1, "queued"), PARTS)
        for num_falls in range(3):
            while not (leases := await responses.take("me", 0.01, 1, 9)):
                await asyncio.sleep(0.005)
            assert await responses.begin(leases[0]) == num_falls
        await responses.release(leases[0])
        (lease,) = await responses.take("me", 60, 1, 9)
        assert await responses.begin(lease) == 2

    play(scenario)


@pytest.mark.parametrize("how", ["lost", "cut"])
def test_a_part_that_is_not_there_whole_changes_nothing(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has lost what it was sent: it has started again, or the sender has given up."""
    stage = RedisResponses._stage

    async def then_lost(responses: RedisResponses, key: str, pieces: Any) -> None:
        await stage(responses, key, pieces)
        if how == "lost":
            await responses._redis.unlink([key])
        else:
            await responses._redis.put_piece(key, 3 * PIECE_BYTES, b"x", 60)

    async def scenario(responses: ResponseStore, store: RedisStore) -> None:
        await responses.add(head(1, "queued"), PARTS)
        (lease,) = await responses.take("me", 60, 1, 9)
        before = await num_bytes(store), await leftovers(store)
        monkeypatch.setattr(RedisResponses, "_stage", then_lost)
        large: dict[Part, Any] = {"output": [b"x" * 2 * PIECE_BYTES]}
        with pytest.raises(StoreAway):
            await responses.add(head(2), {**PARTS, **large})
        with pytest.raises(StoreAway):
            await responses.replace(head(1, "queued"), head(1), lease, parts=large)
        assert (await num_bytes(store), await leftovers(store)) == before
        assert await responses.head(ResponseId("resp_1")) == head(1, "queued")

    play(scenario)


def test_a_caller_that_is_cancelled_leaves_all_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(responses: ResponseStore, store: RedisStore) -> None:
        run, begun = RedisStore.run, asyncio.Event()

        async def running(self: RedisStore, script: str, *args: Any) -> Any:
            if script == ADD:
                begun.set()
            return await run(self, script, *args)

        monkeypatch.setattr(RedisStore, "run", running)
        parts: dict[Part, Any] = {**PARTS, "output": [b"x" * 2 * PIECE_BYTES]}
        for number in range(10):
            large = replace(head(number), num_bytes=sizes_of(parts))
            begun.clear()
            adding = asyncio.create_task(responses.add(large, parts))
            await begun.wait()
            adding.cancel()
            with suppress(asyncio.CancelledError):
                await adding
            await asyncio.gather(*store._calls, return_exceptions=True)
            if await responses.head(large.id):
                assert len(await read(responses, large, "output")) == 2 * PIECE_BYTES
                await responses.delete(large)
            assert await num_bytes(store) == 0 and await leftovers(store) == set()

    play(scenario)


def test_bytes_that_the_server_lost_are_not_taken_for_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    put_piece = RedisStore.put_piece

    async def then_lost(store: RedisStore, key: str, offset: int, data: bytes, seconds: int) -> int:
        found = await put_piece(store, key, offset, data, seconds)
        if not offset:
            await store.unlink([key])
        return found

    async def scenario(responses: ResponseStore, store: RedisStore) -> None:
        monkeypatch.setattr(RedisStore, "put_piece", then_lost)
        with pytest.raises(StoreAway):
            await responses.add(head(1), {**PARTS, "output": [b"x" * 3 * PIECE_BYTES]})
        assert await num_bytes(store) == 0 and await leftovers(store) == set()

    play(scenario)


def test_what_is_refused_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(responses: ResponseStore, store: RedisStore) -> None:
        await responses.add(head(1, "queued"), PARTS)
        monkeypatch.delattr(RedisConnection, "put_piece")
        with pytest.raises(StoreFull):
            await responses.add(head(2), {"output": [b"x" * 2 * PIECE_BYTES]})
        with pytest.raises(TooManyJobs):
            await responses.add(head(2, "queued"), {"output": [b"x" * PIECE_BYTES]})

    play(scenario, StoreLimits(PIECE_BYTES + 10_000, None, max_open_jobs=1))


def test_there_are_limits() -> None:
    async def scenario(responses: ResponseStore, store: RedisStore) -> None:
        await responses.add(head(1, "queued"), PARTS)
        with pytest.raises(TooManyJobs, match="you have 1 open"):
            await responses.add(head(2, "queued"), PARTS)
        await responses.add(head(3, "queued", owner="b"), PARTS)
        with pytest.raises(TooManyJobs):
            await responses.add(head(4, "queued", owner="c"), PARTS)
        await responses.add(head(5), PARTS)
        for size in (5000, 100_000):
            with pytest.raises(StoreFull):
                await responses.add(head(6), {**PARTS, "output": [b"x" * size]})
        assert not {key for key in await leftovers(store) if "staged" in key}

    limits = StoreLimits(5000, None, max_open_jobs=2, max_open_jobs_of_owner=1)
    play(scenario, limits)


@pytest.mark.parametrize("size", [5000, 100_000])
@pytest.mark.parametrize("limits", [StoreLimits(5000, None), StoreLimits(None, 5000)])
def test_there_are_limits_of_what_an_answer_adds(size: int, limits: StoreLimits) -> None:
    async def scenario(responses: ResponseStore, store: RedisStore) -> None:
        queued, over = head(1, "queued"), head(1, "completed")
        await responses.add(queued, {**PARTS, "call": [b"x" * 2000]})
        before = await num_bytes(store)
        with pytest.raises(StoreFull):
            await responses.replace(queued, over, None, (), {"output": [b"x" * size]})
        assert await responses.head(queued.id) == queued and await num_bytes(store) == before
        assert not {key for key in await leftovers(store) if "staged" in key or "output" in key}
        # It is said that it failed in any case. A call makes room for what answers it.
        failed = replace(queued, status="failed", state=b'{"x": "%b"}' % (b"y" * 5000))
        assert await responses.replace(queued, failed, None)
        await responses.delete(failed)
        await responses.add(queued, {**PARTS, "call": [b"x" * 2000]})
        assert await responses.replace(queued, over, None, (), {"output": [b"x" * 4000]})
        assert before + 2000 <= await num_bytes(store) <= 5000

    play(scenario, limits)


def test_those_that_have_expired_are_found() -> None:
    async def scenario(responses: ResponseStore, store: RedisStore) -> None:
        for number in range(3):
            await responses.add(head(number, expires_at=NOW + number), PARTS)
        assert await responses.expired(NOW + 1) == [head(n, expires_at=NOW + n) for n in (0, 1)]

    play(scenario)
