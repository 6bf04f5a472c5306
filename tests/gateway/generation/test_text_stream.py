"""The pieces joined are the text that the offline API gives, however the output ends."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.engine.outputs import TokenOutput
from alignedserve.gateway.generation.generation import TextStream
from alignedserve.offline.collect import SequenceCollector
from alignedserve.sampling_params import SamplingParams
from alignedserve.types import RequestId
from tests.gateway.scripted import EOS, MODEL, TOKENIZER


def streamed(token_ids: list[int], reason: str, params: SamplingParams) -> tuple[list[str], str | None]:
    stream = TextStream(TOKENIZER, params)
    pieces = []
    for position, token_id in enumerate(token_ids, 1):
        pieces.append(stream.append(token_id, reason if position == len(token_ids) else None))
        if stream.stop_string is not None:
            break
    return pieces, stream.stop_string


def collected(token_ids: list[int], reason: str, params: SamplingParams) -> tuple[str, Any]:
    collector = SequenceCollector(0, params, TOKENIZER)
    for position, token_id in enumerate(token_ids, 1):
        is_last = position == len(token_ids)
        collector.add(TokenOutput(RequestId("x"), token_id, reason if is_last else None))
        if collector.output.finished():
            break
    return collector.output.text, collector.output.stop_reason


@given(
    token_ids=st.lists(st.integers(0, MODEL.vocabulary.size - 1), min_size=1, max_size=30),
    reason=st.sampled_from(["stop", "length"]),
    stop=st.lists(st.text("aeiou th1", min_size=1, max_size=4), max_size=3),
    keeps=st.booleans(),
    min_tokens=st.integers(0, 10),
)
def test_streamed_text_is_the_offline_text(
    token_ids: list[int], reason: str, stop: list[str], keeps: bool, min_tokens: int
) -> None:
    params = SamplingParams(
        stop=stop, include_stop_str_in_output=keeps, min_tokens=min_tokens, max_tokens=None
    )
    pieces, stop_string = streamed(token_ids, reason, params)
    assert ("".join(pieces), stop_string) == collected(token_ids, reason, params)


def test_what_may_begin_a_stop_string_waits() -> None:
    params = SamplingParams(stop=["two three"])
    pieces, stop_string = streamed(TOKENIZER.encode("one two four two three"), "length", params)
    shown = ["".join(pieces[: i + 1]) for i in range(len(pieces))]
    assert "one " in shown and "one t" not in shown and "one tw" not in shown
    assert (shown[-1], stop_string) == ("one two four ", "two three")


def test_half_a_character_waits() -> None:
    pieces, _ = streamed([*TOKENIZER.encode("é"), EOS], "stop", SamplingParams())
    assert "".join(pieces) == "é" and "\ufffd" not in pieces


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_without_a_tokenizer_there_is_no_text(reason: str) -> None:
    assert TextStream(None, SamplingParams()).append(5, reason) == ""
