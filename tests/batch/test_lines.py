"""Bytes to lines, wherever the bytes are cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from alignedserve.batch.lines import Line, LineSplitter


def lines_of(pieces: list[bytes], max_line_bytes: int = 1000) -> list[Line]:
    splitter = LineSplitter(max_line_bytes)
    found = [line for piece in pieces for line in splitter.feed(piece)]
    return [line for line in [*found, splitter.end()] if not line.is_blank]


@given(st.lists(st.text("ab \r", max_size=6)), st.booleans(), st.integers(1, 7))
def test_lines_do_not_depend_on_the_cuts(texts: list[str], ends: bool, size: int) -> None:
    content = "\n".join(texts).encode() + b"\n" * ends
    pieces = [content[start : start + size] for start in range(0, len(content), size)]
    expected = [(number, text.strip().encode()) for number, text in enumerate(texts, 1) if text.strip()]
    assert [(line.number, line.text) for line in lines_of(pieces)] == expected


@given(st.lists(st.sampled_from(["", "ab", "\ufeffab"]), max_size=3), st.integers(1, 7))
def test_a_byte_order_mark_is_no_part_of_the_first_line(texts: list[str], size: int) -> None:
    content = "\n".join(texts).encode("utf-8-sig")
    pieces = [content[start : start + size] for start in range(0, len(content), size)]
    expected = [(number, text.encode()) for number, text in enumerate(texts, 1) if text]
    assert [(line.number, line.text) for line in lines_of(pieces)] == expected


@given(st.integers(1, 30))
def test_a_line_too_long_is_told_and_not_kept(size: int) -> None:
    content = b"ab\n" + b"x" * 21 + b"\n" + b"y" * 20 + b"\nz"
    splitter = LineSplitter(20)
    found = list[Line]()
    for start in range(0, len(content), size):
        found += splitter.feed(content[start : start + size])
        assert len(splitter._open) <= 20
    found.append(splitter.end())
    assert found == [Line(1, b"ab"), Line(2, None), Line(3, b"y" * 20), Line(4, b"z")]
