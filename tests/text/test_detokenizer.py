"""The pieces joined are the decoding of the whole, for any ids at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.text.detokenizer import MAX_PENDING
from alignedserve.text.tokenizer import IncrementalDetokenizer, Tokenizer
from tests.text.tokenizers_for_tests import (
    WRITERS,
    byte_fallback_json,
    byte_level_json,
    write,
    write_llama2,
    write_qwen,
)

IDS = st.lists(st.integers(min_value=0, max_value=500), max_size=40)
TEXT = st.text(max_size=30) | st.text(alphabet="the fox é你好🙂\u200d👧e\u0301Ωж \n", max_size=30)


def write_metaspace(directory: Path) -> Path:
    """As newer conversions of SentencePiece models: one decoder that knows which token came first."""
    content = json.loads(byte_fallback_json())
    content["decoder"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    return write(directory, json.dumps(content), {})


def write_byte_level_in_sequence(directory: Path) -> Path:
    content = json.loads(byte_level_json(("</s>",), has_bos=False))
    content["decoder"] = {"type": "Sequence", "decoders": [content["decoder"], {"type": "Fuse"}]}
    return write(directory, json.dumps(content), {})


def write_without_decoder(directory: Path) -> Path:
    content = json.loads(byte_level_json(("</s>",), has_bos=False)) | {"decoder": None}
    return write(directory, json.dumps(content), {})


ALL_WRITERS: dict[str, Callable[[Path], Path]] = {
    **WRITERS,
    "metaspace": write_metaspace,
    "byte level in sequence": write_byte_level_in_sequence,
    "without decoder": write_without_decoder,
}


@pytest.fixture(params=ALL_WRITERS, scope="module")
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_directory(ALL_WRITERS[request.param](tmp_path_factory.mktemp("tokenizer")))


def joined(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
    return "".join([detokenizer.append(token_id) for token_id in ids]) + detokenizer.flush()


@given(text=TEXT, skip=st.booleans(), cut=st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_of_text(tokenizer: Tokenizer, text: str, skip: bool, cut: int) -> None:
    ids = tokenizer.encode(text)
    # the end may fall inside a character, as it does when max_tokens is reached
    ids = ids[: len(ids) - cut]
    assert joined(tokenizer, ids, skip) == tokenizer.decode(ids, skip)


@given(ids=IDS, skip=st.booleans())
@settings(max_examples=200, deadline=None)
def test_of_any_ids(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    assert joined(tokenizer, ids, skip) == tokenizer.decode(ids, skip)


@pytest.mark.slow
@given(ids=st.lists(st.integers(3, 258), max_size=12))
@settings(max_examples=200, deadline=None)
def test_of_random_bytes(tokenizer: Tokenizer, ids: list[int]) -> None:
    """Where the byte tokens of the byte-fallback vocabulary are, and most of the byte-level alphabet."""
    assert joined(tokenizer, ids, True) == tokenizer.decode(ids, True)


@pytest.mark.parametrize("write_one", [write_qwen, write_llama2])
def test_a_character_comes_out_whole(tmp_path: Path, write_one: Callable[[Path], Path]) -> None:
    tokenizer = Tokenizer.from_directory(write_one(tmp_path))
    # not in the training text, so that it goes byte by byte
    ids = tokenizer.encode("a한b", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.append(token_id) for token_id in ids]
    assert pieces.count("") >= 2
    assert "".join(pieces) == "a한b"
    assert not any("\ufffd" in piece for piece in pieces)


def test_text_is_not_held_back_without_need(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(write_llama2(tmp_path))
    detokenizer = IncrementalDetokenizer(tokenizer)
    ids = tokenizer.encode("the quick brown fox", add_special_tokens=False)
    assert all(detokenizer.append(token_id) for token_id in ids)
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("writer", [write_llama2, write_qwen])
def test_bytes_of_tokens_are_those_of_the_character_they_are_part_of(
    writer: Callable[[Path], Path], tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_directory(writer(tmp_path))
    ids = tokenizer.encode("\N{PARTY POPPER}", add_special_tokens=False)
    found = b"".join(map(tokenizer.detokenizer_tables.token_bytes, ids))
    assert len(ids) > 1 and found == "\N{PARTY POPPER}".encode()


@pytest.mark.parametrize(
    ("writer", "token"),
    [
        (write_llama2, "<0x61>"),
        (write_llama2, "<0xE2>"),
        # which spells this byte as a letter
        (write_byte_level_in_sequence, "\u00e2"),
    ],
)
def test_what_seems_never_to_end_is_not_decoded_again_and_again(
    tmp_path: Path, writer: Any, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.from_directory(writer(tmp_path))
    token_id = tokenizer.backend.token_to_id(token)
    assert token_id is not None
    detokenizer = IncrementalDetokenizer(tokenizer)
    counting = Counting(tokenizer.backend)
    monkeypatch.setattr(tokenizer.detokenizer_tables, "backend", counting)
    text = ""
    for _ in range(2000):
        text += detokenizer.append(token_id)
        detokenizer.held_back()
    text += detokenizer.flush()
    # each one as often as a short text has tokens, at most
    assert counting.num_decoded < 2000 * 2 * MAX_PENDING
    assert text == tokenizer.decode([token_id] * 2000)


class Counting:
    def __init__(self, backend: Any) -> None:
        self.num_decoded = 0
        self._backend = backend

    def decode(self, ids: list[int], **options: Any) -> str:
        self.num_decoded += len(ids)
        text: str = self._backend.decode(ids, **options)
        return text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)
