"""Text to calls, however it is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.gateway.tools.calls import MAX_HEAD_CHARS, Nesting
from alignedserve.gateway.tools.json_readers import MAX_OBJECT_CHARS, JsonInTextReader, JsonReader
from alignedserve.gateway.tools.marked_readers import HermesReader
from alignedserve.gateway.tools.readers import (
    CallPiece,
    ContentPiece,
    NamedReader,
    Read,
    Reader,
    ReadPart,
    ThoughtPiece,
)
from alignedserve.gateway.tools.reading import TextReading
from alignedserve.gateway.tools.reasoning import Thinking

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
ROME = CallPiece("weather", '{"city": "Rome"}')
CLOCK = CallPiece("clock", "{}")


def read_all(reader: Reader, pieces: list[str]) -> Read:
    read = Read()
    for part in [*(reader.feed(piece) for piece in pieces), reader.end()]:
        read.add(part)
    return read


def finding() -> Reader:
    return JsonInTextReader({"x"})


CASES = [
    (HermesReader, f"a{CALL}\n\n{OTHER}b{OTHER}\nc<tool_", "abc<tool_", [ROME, CLOCK, CLOCK]),
    (HermesReader, "<tool_call>{broken</tool_call> and <tool_call>{}", None, []),
    (HermesReader, "<<tool_call>[1]</tool_call>", None, []),
    (HermesReader, '<tool_call>{"name": "x", "argum', None, []),
    # from the other end, and more than one of them
    (HermesReader, '<tool_call>{"arguments": {}, "name": "x"}</tool_call>', "", [CallPiece("x", "{}")]),
    (HermesReader, '<tool_call>[{"arguments": {}, "name": "x"}]</tool_call>', "", [CallPiece("x", "{}")]),
    # a tag in a string is none
    (
        HermesReader,
        '<tool_call>{"name": "x", "arguments": {"a": "</tool_call>\\"{"}}</tool_call>b',
        "b",
        [CallPiece("x", '{"a": "</tool_call>\\"{"}')],
    ),
    # what was told is told
    (HermesReader, '<tool_call>{"name": "x", "arguments": {"a": 1', "", [CallPiece("x", '{"a": 1')]),
    (
        HermesReader,
        '<tool_call>{"name": "x", "arguments": {"a": </tool_call>b',
        "b",
        [CallPiece("x", '{"a": ')],
    ),
    (
        HermesReader,
        '<tool_call>{"name": "x", "arguments": {}, "id": 5}</tool_call>b',
        "b",
        [CallPiece("x", "{}")],
    ),
    (HermesReader, '<tool_call>{"name": "a</tool_call>", "arguments": {}}', None, []),
    (
        HermesReader,
        '<tool_call>{"arguments": {"a": "</tool_call>\\"<tool_call>{"}, "name": "x"}</tool_call>b',
        "b",
        [CallPiece("x", '{"a": "</tool_call>\\"<tool_call>{"}')],
    ),
    # A quotation mark is missing: the mark closes the call.
    (
        HermesReader,
        f'<tool_call>{{"arguments": {{"a": "b}}, "name": "x"}}</tool_call>c{CALL}',
        '<tool_call>{"arguments": {"a": "b}, "name": "x"}</tool_call>c',
        [ROME],
    ),
    (
        HermesReader,
        '<tool_call>{"arguments": {"a": "b</tool_call>c<tool_call>{"arguments": {}, "name": "clock"}</tool_call>',
        '<tool_call>{"arguments": {"a": "b</tool_call>c',
        [CLOCK],
    ),
    (
        HermesReader,
        f'<tool_call>{{"arguments": {{"a": "b</tool_call>{OTHER}',
        '<tool_call>{"arguments": {"a": "b</tool_call>',
        [CLOCK],
    ),
    (HermesReader, '<tool_call>{"arguments": {"a": "b</tool_call> and so on', None, []),
    (
        HermesReader,
        '<tool_call>{"arguments" : {"a":[ "b" , "" ] } , "name":"x" }</tool_call>',
        "",
        [CallPiece("x", '{"a": ["b", ""]}')],
    ),
    (JsonReader, '  [{"name": "x", "arguments": {}}]', "", [CallPiece("x", "{}")]),
    (
        JsonReader,
        '[{"name": "x", "parameters": {"a": {"b": "}"}}}, {"name": "y", "arguments": {}}]\n',
        "",
        [CallPiece("x", '{"a": {"b": "}"}}'), CallPiece("y", "{}")],
    ),
    (JsonReader, '{"type": "function", "name": "x", "parameters": {}}', "", [CallPiece("x", "{}")]),
    (JsonReader, '{"parameters": {}, "name": "x"}', "", [CallPiece("x", "{}")]),
    (
        JsonReader,
        '{"name": "x", "parameters": {}}; {"name": "y", "parameters": {}}',
        "",
        [CallPiece("x", "{}"), CallPiece("y", "{}")],
    ),
    (JsonReader, '{"name": "x", "parameters": {}, "z": [1]} and more', "and more", [CallPiece("x", "{}")]),
    (JsonReader, '{"name": "x", "parameters": {"a": "b', "", [CallPiece("x", '{"a": "b')]),
    (JsonReader, '{"name": "x"}', None, []),
    (JsonReader, '[{"a": 1}, 2]', None, []),
    (JsonReader, " text", None, []),
    (JsonReader, "", "", []),
    (lambda: NamedReader("x"), '{"a": 1', "", [CallPiece("x", '{"a": 1')]),
    (lambda: NamedReader("x"), "", "", [CallPiece("x", "")]),
]


@pytest.mark.parametrize(("kind", "text", "content", "calls"), CASES)
def test_how_the_text_is_cut_makes_no_difference(
    kind: Any, text: str, content: str | None, calls: list[CallPiece]
) -> None:
    """`content`: None is all of it."""
    whole = read_all(kind(), [text])
    assert (whole.content, whole.pieces) == (text if content is None else content, calls)
    assert read_all(kind(), list(text)) == whole
    for cut in range(len(text)):
        assert read_all(kind(), [text[:cut], text[cut:]]) == whole


def test_what_is_read_keeps_its_order() -> None:
    parts: list[ReadPart] = [
        ContentPiece("a"),
        ROME,
        CLOCK,
        ContentPiece("b"),
        CLOCK,
        ContentPiece("c<tool_"),
    ]
    assert read_all(HermesReader(), [f"a{CALL}\n\n{OTHER}b{OTHER}\nc<tool_"]) == Read(parts)
    text = f"Hm.</think>\na{CALL}\n\nb"
    found = read_all(reading("hermes", Thinking("<think>", "</think>", is_open=True))(), [text])
    assert found == Read([ThoughtPiece("Hm."), ContentPiece("a"), ROME, ContentPiece("b")])


PARTS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        '{"name": "x", ',
        '"arguments": ',
        "{",
        "}",
        "[",
        "]",
        '"',
        "\\",
        ",",
        "\n",
        "a",
        "<",
    ]
)


@given(st.lists(PARTS, max_size=12), st.sampled_from([HermesReader, JsonReader, finding]), st.integers(1, 9))
def test_nor_does_it_in_what_nobody_would_write(parts: list[str], kind: Any, size: int) -> None:
    text = "".join(parts)
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    assert read_all(kind(), pieces) == read_all(kind(), [text])


@pytest.mark.parametrize(
    ("kind", "opening", "closing"),
    [(JsonReader, "", ""), (HermesReader, "<tool_call>", "</tool_call>"), (finding, "", "")],
)
def test_a_call_in_another_form_is_kept_up_to_a_length_and_then_shown(
    kind: Any, opening: str, closing: str
) -> None:
    before, after = f'{opening}{{"arguments": {{"a": "', '"}, "name": "x"}'
    room = MAX_OBJECT_CHARS - len(before + after) + len(opening)
    for num_chars in (room, room + 1, 3 * MAX_OBJECT_CHARS):
        text = before + "b" * num_chars + after + closing
        for size in (1000, len(text)):
            reader = kind()
            read = Read()
            for start in range(0, len(text), size):
                read.add(reader.feed(text[start : start + size]))
                assert len(read.content) >= start + size - len(opening) - MAX_OBJECT_CHARS - 1 or read.pieces
            read.add(reader.end())
            is_call = num_chars == room
            assert [piece.name for piece in read.pieces] == ["x"] * is_call, num_chars
            assert is_call or read.content == text
    # In what is shown there may be calls.
    assert read_all(kind(), [before + "b" * MAX_OBJECT_CHARS + after]).pieces == []
    if kind is not JsonReader:
        inner = opening + '{"name": "x", "arguments": {}}' + closing
        read = read_all(kind(), [before + "b" * MAX_OBJECT_CHARS + inner])
        assert read.pieces == [CallPiece("x", "{}")]


def test_objects_that_are_no_calls_are_read_again_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a bare word opens calls, each of many may have an object that goes on to the end of the text."""
    num_chars, end = 0, Nesting.end

    def counted(self: Nesting, text: str, start: int, stop: int) -> int | None:
        nonlocal num_chars
        found = end(self, text, start, stop)
        num_chars += (stop if found is None else found) - start
        return found

    monkeypatch.setattr(Nesting, "end", counted)
    text = 'functools{"<|/tool_call|>",' * 6000
    reader = TextReading("phi").new_reader()
    read = Read()
    for start in range(0, len(text), 4):
        read.add(reader.feed(text[start : start + 4]))
    read.add(reader.end())
    assert read.content == text and num_chars < 4 * len(text)


def test_arguments_are_told_as_they_come() -> None:
    for reader, opening in (
        (HermesReader(), '<tool_call>{"name": "x", "arguments": '),
        (JsonReader(), '{"name": "x", "parameters": '),
    ):
        assert reader.feed(opening) == Read()
        assert reader.feed("{") == Read([CallPiece("x", "{")])
        assert reader.feed('"a"') == Read([CallPiece(None, '"a"')])
        assert reader.feed(": 1}") == Read([CallPiece(None, ": 1}")])
        assert reader.feed("}") == Read()


def reading(name: str, thinking: Thinking | None = None) -> Callable[[], Reader]:
    return TextReading(name, types={"x": {}}, thinking=thinking).new_reader


def strings_of(reader: Reader) -> Iterator[str]:
    """What a reader looks at again: what it only keeps is in lists."""
    for found in vars(reader).values():
        if isinstance(found, Reader):
            yield from strings_of(found)
        elif isinstance(found, str):
            yield found


FREE = Thinking("<think>", "</think>", False)


@pytest.mark.parametrize(
    ("kind", "opening", "more"),
    [
        *(
            (reading(name), "", " " * 40)
            for name in ("hermes", "glm", "deepseek", "pythonic", "json-in-text")
        ),
        (reading("deepseek"), "<｜tool▁calls▁begin｜>", " " * 40),
        (reading("phi"), "functools", " [" * 20),
        (reading("glm"), "<tool_call>x", " " * 40),
        (reading("glm"), "<tool_call>x<arg_key>k</arg_key><arg_value>", "<tool_call>x</tool_call>"),
        (reading("qwen-coder"), "<tool_call><function=x><parameter=k>", "</function>" * 4),
        (reading("qwen-coder"), "<tool_call><function=x>", "<" * 40),
        (reading("pythonic"), "[", " " * 40),
        (reading("pythonic"), "[x(a='", " " * 40),
        (reading("hermes", FREE), "", " " * 40),
        (reading("hermes", FREE), "<think>", " " * 40),
        (reading("hermes", FREE), "<think>a", " " * 40),
        (reading("hermes", FREE), '<think>a<tool_call>{"', " " * 40),
        (JsonReader, '{"name": "', "x" * 40),
        (JsonReader, "{", " " * 40),
        (JsonReader, "[", "[, " * 13),
        (JsonReader, " ", " " * 40),
        (JsonReader, '{"name": "x", "arguments": {', '"a": {"b": [], '),
        (JsonReader, '{"name": "x", "arguments": {}, ', '"a": {"b": [], '),
        (finding, "So: {", "[ {[" * 10),
        (finding, "So: {", " " * 40),
        (finding, 'So: {"name": "', "x" * 40),
        (finding, "So: ", '{"name": ' * 5),
        (HermesReader, "<tool_call>", " " * 40),
        (HermesReader, '<tool_call>{"a": "', "</tool_call>" * 3),
        (HermesReader, '<tool_call>{"a": "', '</tool_call><tool_call>{"a": "'),
        (HermesReader, '<tool_call>{"name": "', "<tool_" * 7),
        (HermesReader, '<tool_call>{"name": "x", "arguments": {', '"a": {"b": [], '),
        (HermesReader, '<tool_call>{"name": "x", "arguments": {}', "</tool_" * 6),
        (HermesReader, "", "<tool_" * 7),
    ],
)
def test_of_a_long_text_only_the_end_is_looked_at_again(kind: Any, opening: str, more: str) -> None:
    reader = kind()
    said = reader.feed(opening)
    for _ in range(1000):
        said.add(reader.feed(more))
        assert all(len(text) < 2 * MAX_HEAD_CHARS for text in strings_of(reader))
    said.add(reader.end())
    assert said == read_all(kind(), [opening + 1000 * more])
    if not said.pieces and not opening.startswith("<think>"):
        assert said.content == opening + 1000 * more
