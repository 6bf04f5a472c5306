"""Lines that begin alike come together, whatever their order in the file; none is lost, and few are in memory."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.batch import alike
from alignedserve.batch.alike import alike_together
from alignedserve.batch.lines import Line


def line(number: int, *texts: str) -> Line:
    messages = [{"role": "user", "content": text} for text in texts]
    body = {"model": "demo", "messages": messages}
    return Line(number, json.dumps({"custom_id": f"{number}" * 9, "url": "/v1", "body": body}).encode())


def ordered(lines: Sequence[Line]) -> list[Line]:
    async def all_of() -> AsyncIterator[Line]:
        for each in lines:
            yield each

    async def scenario() -> list[Line]:
        return [each async for each in alike_together(all_of())]

    return asyncio.run(scenario())


@pytest.mark.parametrize("length", [400, 3000, 30_000])
def test_lines_about_a_document_come_together(length: int) -> None:
    dice = random.Random(0)
    shared = "".join(dice.choices("abc ", k=length))
    documents = [shared + "".join(dice.choices("abc ", k=length)) for _ in range(4)]
    lines = [line(number, documents[number % 4], f"question {number}") for number in range(40)]
    found = [each.number % 4 for each in ordered(lines)]
    changes = sum(one != other for one, other in pairwise(found))
    # beyond 16 KiB, those with the same beginning are in the file's order
    assert changes == (3 if length < 30_000 else 39)


@pytest.mark.parametrize("texts", [["the same"] * 20, [f"{number} is it" for number in range(20)]])
def test_lines_that_share_nothing_or_everything_keep_their_order(texts: list[str]) -> None:
    lines = [line(number, text) for number, text in enumerate(texts)]
    assert ordered(lines) == lines


@given(st.lists(st.binary(max_size=600) | st.none()))
def test_any_lines_come_once_each(texts: list[bytes | None]) -> None:
    lines = [Line(number, text) for number, text in enumerate(texts)]
    assert sorted(ordered(lines), key=lambda each: each.number) == lines


def test_a_window_bounds_what_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alike, "WINDOW_LINES", 10)
    monkeypatch.setattr(alike, "WINDOW_BYTES", 5000)
    num_read = num_yielded = 0

    async def counted() -> AsyncIterator[Line]:
        nonlocal num_read
        for number in range(100):
            num_read += 1
            yield line(number, "x" * (2000 if number >= 50 else 10))

    async def scenario() -> None:
        nonlocal num_yielded
        async for each in alike_together(counted()):
            num_yielded += 1
            assert num_read - num_yielded < (10 if each.number < 50 else 3)

    asyncio.run(scenario())
    assert num_yielded == 100
