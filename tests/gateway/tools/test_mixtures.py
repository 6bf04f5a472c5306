"""Whatever a model writes, of text, marks, calls, slips and parts of them: it is read in the same way wherever it is
cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.gateway.tools.readers import CollectedText, Read
from alignedserve.gateway.tools.reading import TextReading
from alignedserve.gateway.tools.reasoning import Thinking
from tests.gateway.tools.test_families import CASES, SLIPS, TYPES, cut

Found = tuple[str, str, list[tuple[str, str]]]

MARKS = [
    *("<tool_call>", "</tool_call>", "<function=", "<function=weather>", "<function=NAME>", "</function>"),
    *("<parameter=city>", "</parameter>", "<arg_key>", "city</arg_key>", "<arg_value>", "</arg_value>"),
    *(
        "functools",
        "<|tool_call|>",
        "<|/tool_call|>",
        "<tool_calls>",
        "</tool_calls>",
        "[TOOL_CALLS]",
        "[ARGS]",
    ),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "```json\n",
        "```",
    ),
    *(
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
    *(
        '{"name": "clock", "parameters": {}}',
        '{"parameters": {}, "name": "clock"}',
        '{"name": "weather", "arguments": ',
    ),
    *('{"name": "NAME", "parameters": {}}', '{"name": "Bob"}', '{"city": "Rome"}', '"name"', "[1, 2]", "[{"),
    *("<think>", "</think>", "clock", "weather", "Hm.", " ", "  \n", "\n", *'[]{}",:<\\1'),
]
TEXTS = {
    name: [case[2] for case in CASES if case[0] == name] + [slip[1] for slip in SLIPS if slip[0] == name]
    for name in {case[0] for case in CASES} | {slip[0] for slip in SLIPS}
}


@st.composite
def parts_of(draw: st.DrawFn, name: str) -> str:
    text = draw(st.sampled_from(TEXTS[name]))
    start = draw(st.one_of(st.just(0), st.integers(0, len(text))))
    return text[start : draw(st.one_of(st.just(len(text)), st.integers(start, len(text))))]


def found_in(reading: TextReading, pieces: list[str], is_cut: bool) -> tuple[Found, Read]:
    """Returns what is collected, and the same in its order."""
    reader, found, read = reading.new_reader(), CollectedText(), Read()
    for part in [*(reader.feed(piece) for piece in pieces), reader.end(is_cut=is_cut)]:
        found.add(part)
        read.add(part)
    return (found.content, found.reasoning, found.calls), read


@pytest.mark.parametrize("thinking", [None, Thinking("<think>", "</think>", True)], ids=["", "thinking"])
@pytest.mark.parametrize("name", sorted(TEXTS))
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_a_mixture_is_read_in_the_same_way_wherever_it_is_cut(
    name: str, thinking: Thinking | None, data: st.DataObject
) -> None:
    text = "".join(data.draw(st.lists(st.one_of(parts_of(name), st.sampled_from(MARKS)), max_size=8)))
    reading, is_cut = TextReading(name, types=TYPES, thinking=thinking), data.draw(st.booleans())
    whole = found_in(reading, [text], is_cut)
    assert found_in(reading, list(text), is_cut) == whole
    if len(text) > 1:
        assert found_in(reading, cut(text, data), is_cut) == whole
    (content, reasoning, calls), read = whole
    assert (content, reasoning) == (read.content, read.reasoning)
    assert calls == [(piece.name, piece.arguments) for piece in read.pieces]
    # Without a call, nothing is lost.
    if not calls and not thinking and name != "harmony":
        assert content == text
