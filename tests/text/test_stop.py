"""Where stop strings end a text, token by token."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.sampling_params import SamplingParams
from alignedserve.text.stop import StopStrings, _Overlap
from alignedserve.text.tokenizer import Tokenizer
from tests.text.tokenizers_for_tests import write_llama2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_directory(write_llama2(tmp_path_factory.mktemp("tokenizer")))


def ids(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    found = [tokenizer.backend.token_to_id(token) for token in tokens]
    known = [token_id for token_id in found if token_id is not None]
    assert len(known) == len(tokens)
    return known


def stopped_at(tokenizer: Tokenizer, token_ids: list[int], **params: Any) -> tuple[int, str, str] | None:
    """How many tokens it took, the stop string found, and the text that is left."""
    stop = StopStrings(tokenizer, SamplingParams(max_tokens=100, **params))
    texts: list[str] = []
    for count, token_id in enumerate(token_ids, start=1):
        found = stop.append(token_id, count)
        if found is not None:
            return count, found, "".join(texts) + stop.take_all()
        texts.append(stop.take())
    return None


@pytest.mark.parametrize("stop", ["a", ["a", "something much longer"]])
def test_what_min_tokens_let_pass_is_not_found_later(tokenizer: Tokenizer, stop: Any) -> None:
    token_ids = ids(tokenizer, "a", "b", "c", "d")
    assert stopped_at(tokenizer, token_ids, stop=stop, min_tokens=2) is None
    again = [*token_ids, *ids(tokenizer, "a")]
    assert stopped_at(tokenizer, again, stop=stop, min_tokens=2) == (5, "a", "abcd")


def test_a_string_that_ends_in_a_byte_token_stops_at_that_token(tokenizer: Tokenizer) -> None:
    """Llama 2 and Mistral have no token for a new line but its byte."""
    token_ids = ids(tokenizer, "a", "<0x0A>", "<0x0A>", "b")
    assert stopped_at(tokenizer, token_ids, stop="\n") == (2, "\n", "a")
    assert stopped_at(tokenizer, token_ids, stop="a\n\n") == (3, "a\n\n", "")
    assert stopped_at(tokenizer, token_ids, stop="\n", min_tokens=2) == (3, "\n", "a\n")
    assert stopped_at(tokenizer, token_ids, stop="\nb") == (4, "\nb", "a\n")


def test_of_two_strings_that_a_token_completes_the_first_one_ends_the_text(tokenizer: Tokenizer) -> None:
    token_ids = ids(tokenizer, "a", "b", "c")
    assert stopped_at(tokenizer, token_ids, stop=["b", "ab"]) == (2, "ab", "")
    assert stopped_at(tokenizer, token_ids, stop=["ab", "b"]) == (2, "ab", "")


def test_half_a_character_stops_nothing(tokenizer: Tokenizer) -> None:
    token_ids = ids(tokenizer, "a", "<0xC3>", "<0xA9>", "b")
    assert stopped_at(tokenizer, token_ids, stop=["\ufffd", "é"]) == (3, "é", "a")


@given(st.text("ab", min_size=1, max_size=8), st.lists(st.text("abc", max_size=6), max_size=10))
def test_what_may_begin_a_stop_string_is_known_at_each_letter(string: str, pieces: list[str]) -> None:
    overlap, text = _Overlap(string), ""
    for piece in pieces:
        overlap.append(piece)
        text += piece
        sizes = range(min(len(text), len(string) - 1), -1, -1)
        assert overlap.size == next(size for size in sizes if text.endswith(string[:size]))


def test_of_a_long_text_only_the_end_is_kept(tokenizer: Tokenizer) -> None:
    params = SamplingParams(stop=["a" * 255 + "b", "ab" * 128, "c" * 256], max_tokens=None)
    stop, longest, num_taken = StopStrings(tokenizer, params), 0, 0
    tokens = ids(tokenizer, *"aaabababcd") * 300
    for count, token in enumerate(tokens, start=1):
        assert stop.append(token, count) is None
        num_taken += len(stop.take())
        longest = max(longest, len(stop._text))
    assert longest < 256 and num_taken + len(stop.take_all()) == len(tokens)
