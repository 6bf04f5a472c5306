"""Reading a file takes the event loop a step at a time, whatever is in it and however many read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from alignedserve.batch import reader as reader_module
from alignedserve.batch.config import MAX_LINES_WITH_BLANKS, STEP_BYTES, STEP_LINES
from alignedserve.batch.inputs import Inputs
from alignedserve.batch.lines import Line, TooManyLines, lines_of
from alignedserve.batch.loop_turns import LoopTurns
from alignedserve.batch.parse import LineProblem, parse
from alignedserve.batch.placed_inputs import PlacedInputs
from alignedserve.batch.reader import LineReader
from alignedserve.store import ContentsInStore, FileRecord, JobRecord
from alignedserve.store.contents import CHUNK_BYTES
from alignedserve.store.records import new_file_id, new_job_id
from alignedserve.store.redis_store import RedisStore
from tests.store import redis_process
from tests.store.redis_process import RedisProcess


def play(scenario: Callable[[RedisStore], Awaitable[None]]) -> None:
    async def with_store(_: RedisProcess, store: RedisStore) -> None:
        await scenario(store)

    redis_process.play(with_store)


async def stored(store: RedisStore, content: bytes) -> JobRecord:
    """Returns a job with this input."""
    file_id = new_file_id()
    chunks = [content[start : start + CHUNK_BYTES] for start in range(0, len(content), CHUNK_BYTES)]
    for number, chunk in enumerate(chunks):
        await store.put_chunk(file_id, "", number, chunk)
    await store.commit_file(FileRecord(file_id, "in.jsonl", "batch", len(content), len(chunks), 100))
    return JobRecord(
        id=new_job_id(),
        endpoint="/v1/completions",
        input_file_id=file_id,
        completion_window="1h",
        created_at=1,
        expires_at=2,
    )


def inputs(store: RedisStore) -> Inputs:
    return Inputs(store, ContentsInStore(store), PlacedInputs(()))


class Counted(LoopTurns):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    async def next(self) -> None:
        self.count += 1
        await super().next()


@pytest.mark.parametrize(
    ("line", "per_step"), [(b"", STEP_LINES), (b"xy", STEP_LINES), (b"x" * 8191, STEP_BYTES // 8191 + 1)]
)
def test_a_step_has_so_many_lines_and_so_many_bytes(line: bytes, per_step: int) -> None:
    async def scenario(store: RedisStore) -> None:
        turns, num_lines = Counted(), 10 * per_step
        job = await stored(store, (line + b"\n") * num_lines)
        found = [each async for each in lines_of(inputs(store).chunks(job), turns)]
        assert len(found) == (num_lines if line else 0) and turns.count == 10

    play(scenario)


def test_blank_lines_are_not_read_for_ever() -> None:
    async def scenario(store: RedisStore) -> None:
        turns = Counted()
        job = await stored(store, b"\n" * (10 << 20))
        with pytest.raises(TooManyLines):
            async for _ in lines_of(inputs(store).chunks(job), turns):
                pass
        assert turns.count == MAX_LINES_WITH_BLANKS // STEP_LINES

    play(scenario)


def test_however_many_have_much_to_do_the_loop_goes_round_between_two_steps() -> None:
    async def scenario() -> None:
        loop, turns = asyncio.get_running_loop(), LoopTurns()
        round_number, steps = 0, []
        last = asyncio.Event()

        def next_round() -> None:
            nonlocal round_number
            round_number += 1
            if not last.is_set():
                loop.call_soon(next_round)

        async def work(name: int) -> None:
            for _ in range(20):
                await turns.next()
                steps.append((round_number, name))

        loop.call_soon(next_round)
        await asyncio.gather(*(work(name) for name in range(8)))
        last.set()
        rounds = [number for number, _ in steps]
        assert len(rounds) == 160 and len(set(rounds)) == 160
        # and each has its turn
        names = [name for _, name in steps]
        assert all(set(names[start : start + 8]) == set(range(8)) for start in range(0, 160, 8))

    asyncio.run(scenario())


def test_long_lines_are_taken_apart_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """1.8 million items, and what else takes long for its bytes."""

    def parsed_here(text: bytes | None, number: int) -> object:
        assert text is None or len(text) <= STEP_BYTES
        return parse(text, number)

    monkeypatch.setattr(reader_module, "parse", parsed_here)

    def line(body: bytes) -> bytes:
        return b'{"custom_id": "a", "method": "POST", "url": "u", "body": ' + body + b"}"

    async def scenario() -> None:
        reader = LineReader()
        items = b'{"messages": [' + b"1," * 1_800_000 + b'1], "model": "demo"}'
        found = await reader.parsed(Line(1, line(items)))
        assert (found.model, line(items)[found.start : found.end]) == ("demo", items)
        with pytest.raises(LineProblem) as error:
            await reader.parsed(Line(2, line(b'{"a": ' + b"[" * 100_000 + b"}")))
        assert [(each.code, each.line) for each in error.value.wrong.problems] == [("invalid_json_line", 2)]
        # whoever leaves in the middle of it takes his answer with him
        asking = asyncio.create_task(reader.parsed(Line(3, line(items))))
        await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.wait({asking})
        assert (await reader.parsed(Line(4, line(b'{"x": "' + b"y" * STEP_BYTES + b'"}')))).model is None
        await reader.aclose()

    asyncio.run(scenario())
