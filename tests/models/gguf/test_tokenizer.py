"""The tokenizer of a GGUF file is the one that its vocabulary was written for."""

from __future__ import annotations

import json
import tracemalloc
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from alignedserve.models.gguf.container import Header, read_header
from alignedserve.models.gguf.pre_tokenizers import MADE_OF_NFC
from alignedserve.models.gguf.tokenizer import Vocabulary, tokenizer_config_of, tokenizer_of
from alignedserve.models.hf_config import load_model_config
from alignedserve.models.source import resolve_model
from alignedserve.text.tokenizer import Tokenizer
from tests.models.gguf.files import write_gguf
from tests.text.tokenizers_for_tests import CHATML, byte_fallback_json, byte_level_json

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
TEXTS = [
    *("", " ", "  ", "a", "the quick brown fox", "the  quick   brown    fox", " leading and trailing "),
    *(
        "it's 10% off! I'LL don't",
        "one 1 two 22 three 333 four 4444",
        "x = [3.14, -1e9]; // no",
        "\n\n\n a \r\n\r\n\t",
    ),
    *(
        "naïve café",
        "e\u0301 A\u030a",
        "你好世界日本語のテキスト",
        "Ελληνικά Привет мир",
        "שלום مرحبا ٣٤",
        "नमस्ते ไทย",
    ),
    *("🙂👩‍👩‍👧🇩🇪", "²³½ⅷ", "def f(x):\n\treturn x  # ünï\n", "a\u200bb\u00a0c", "<think>so</think>"),
    *(
        "hello<|im_end|>\n<|im_start|>user",
        "CamelCaseAndSNAKE_CASE",
        "a" * 70,
        "!?!?...---",
        "http://a.b/c?d=e&f",
    ),
]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PRES = ["gpt-2", "llama-bpe", "qwen2", "gpt-4o", "tekken"]


def add_byte_level(
    writer: gguf.GGUFWriter, pre: str | None = "gpt-2", merges: list[str] | None = None
) -> None:
    content = json.loads(byte_level_json(SPECIAL, has_bos=False))
    added = {each["content"]: each["special"] for each in content["added_tokens"]}
    ids = content["model"]["vocab"] | {each["content"]: each["id"] for each in content["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(
        [(CONTROL if added[token] else USER_DEFINED) if token in added else NORMAL for token in tokens]
    )
    writer.add_token_merges(
        [" ".join(pair) for pair in content["model"]["merges"]] if merges is None else merges
    )
    writer.add_bos_token_id(ids["<|im_start|>"])
    writer.add_eos_token_id(ids["<|im_end|>"])
    writer.add_chat_template(CHATML)


def add_sentence_pieces(writer: gguf.GGUFWriter) -> None:
    content = json.loads(byte_fallback_json())
    ids = content["model"]["vocab"]
    tokens = sorted(ids, key=ids.__getitem__)
    kinds = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
    kinds |= {f"<0x{byte:02X}>": BYTE for byte in range(256)}
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(number) for number in range(len(tokens))])
    writer.add_token_types([kinds.get(token, NORMAL) for token in tokens])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


@pytest.fixture
def write(tiny_model: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    def write(change: Callable[[gguf.GGUFWriter], None], family: str = "llama-mha") -> Path:
        return write_gguf(tiny_model(family), tmp_path / "model.gguf", change=change)

    return write


def tokenizer_of_file(path: Path) -> Tokenizer:
    directory = resolve_model(path).directory
    assert directory is not None
    return Tokenizer.from_directory(directory)


@pytest.mark.parametrize("pre", PRES)
def test_byte_level_tokenizers_are_those_of_transformers(write: Callable[..., Path], pre: str) -> None:
    path = write(lambda writer: add_byte_level(writer, pre))
    mine = tokenizer_of_file(path)
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in TEXTS:
        composed = unicodedata.normalize("NFC", text) if pre in MADE_OF_NFC else text
        wanted = theirs(composed, add_special_tokens=False)["input_ids"]
        assert mine.encode(text, add_special_tokens=False) == wanted, text
        assert mine.decode(wanted, skip_special_tokens=False) == composed


def test_a_token_of_users_is_found_in_its_own_letters(write: Callable[..., Path]) -> None:
    """transformers looks for it in the letters that stand for its bytes."""
    mine = tokenizer_of_file(write(add_byte_level))
    ids = mine.encode("so é spelled out.")
    assert mine.backend.token_to_id("é spelled out") in ids
    assert mine.decode(ids) == "so é spelled out."


def test_each_digit_is_a_word_where_the_name_says_so(write: Callable[..., Path]) -> None:
    mine = tokenizer_of_file(write(lambda writer: add_byte_level(writer, "smollm", merges=["1 0"])))
    plain = tokenizer_of_file(write(lambda writer: add_byte_level(writer, "gpt-2", merges=["1 0"])))
    assert len(mine.encode("a10")) == len(plain.encode("a10")) + 1 == 3


def test_sentence_pieces_are_those_of_the_vocabulary(write: Callable[..., Path]) -> None:
    mine = tokenizer_of_file(write(add_sentence_pieces))
    original = tokenizers.Tokenizer.from_str(byte_fallback_json())
    for text in TEXTS:
        wanted = original.encode(text).ids
        assert mine.encode(text) == wanted, text
        assert mine.decode(wanted) == original.decode(wanted) == text


def test_gemmas_pieces_are_those_of_transformers(write: Callable[..., Path]) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        add_sentence_pieces(writer)
        writer.add_add_space_prefix(False)

    path = write(change, "gemma3")
    mine = tokenizer_of_file(path)
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in TEXTS:
        assert mine.encode(text) == theirs(text)["input_ids"], text


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=40))
def test_any_text_comes_back(shared: Tokenizer, text: str) -> None:
    assert shared.decode(shared.encode(text, add_special_tokens=False), skip_special_tokens=False) == text


@pytest.fixture(scope="module", params=["bytes", "pieces"])
def shared(
    request: pytest.FixtureRequest,
    tiny_model: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Tokenizer:
    path = tmp_path_factory.mktemp("shared") / "model.gguf"
    change = {"bytes": lambda writer: add_byte_level(writer, "llama-bpe"), "pieces": add_sentence_pieces}
    header = read_header(write_gguf(tiny_model("llama-mha"), path, change=change[request.param]))
    (path.parent / "tokenizer.json").write_text(json.dumps(tokenizer_of(header)))
    (path.parent / "tokenizer_config.json").write_text(json.dumps(tokenizer_config_of(header)))
    return Tokenizer.from_directory(path.parent)


@pytest.mark.parametrize(
    ("adds", "model", "pre"),
    [
        (True, "llama", "default"),
        (True, "gpt2", "llama-bpe"),
        (False, "gpt2", "qwen2"),
        (False, "gpt2", "gpt-2"),
    ],
)
def test_what_begins_a_text_if_the_file_does_not_say(
    write: Callable[..., Path], adds: bool, model: str, pre: str
) -> None:
    change = add_sentence_pieces if model == "llama" else lambda writer: add_byte_level(writer, pre)
    mine = tokenizer_of_file(write(change))
    assert len(mine.encode("a")) - len(mine.encode("a", add_special_tokens=False)) == adds


@pytest.mark.parametrize(("adds_bos", "adds_eos"), [(True, True), (False, True), (False, False)])
def test_what_is_added_is_what_the_file_says(
    write: Callable[..., Path], adds_bos: bool, adds_eos: bool
) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        add_sentence_pieces(writer)
        writer.add_add_bos_token(adds_bos)
        writer.add_add_eos_token(adds_eos)

    mine = tokenizer_of_file(write(change))
    plain = mine.encode("a", add_special_tokens=False)
    assert mine.encode("a") == [1] * adds_bos + plain + [2] * adds_eos


def test_the_chat_template_and_the_ends_of_turns_are_the_files(write: Callable[..., Path]) -> None:
    path = write(lambda writer: add_byte_level(writer, "qwen2"))
    mine, directory = tokenizer_of_file(path), resolve_model(path).directory
    assert directory is not None
    asked = [{"role": "user", "content": "hi <|im_end|>"}]
    assert mine.apply_chat_template(asked) == (
        "<|im_start|>user\nhi <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    # Control tokens in a message are text.
    vocabulary = mine.backend.get_vocab()
    ids = [vocabulary[token] for token in SPECIAL]
    assert mine.chat_ids(asked).count(ids[2]) == 1
    assert load_model_config(directory).eos_token_ids == (ids[2], ids[0])
    assert mine.eos_token_id == ids[2]


def test_ends_of_turns_are_control_tokens_also_among_those_of_users(write: Callable[..., Path]) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        add_byte_level(writer)
        kinds = writer.kv_data[0]["tokenizer.ggml.token_type"].value
        writer.kv_data[0]["tokenizer.ggml.token_type"].value = [
            USER_DEFINED if kind == CONTROL else kind for kind in kinds
        ]

    path = write(change)
    mine, directory = tokenizer_of_file(path), resolve_model(path).directory
    assert directory is not None
    vocabulary = mine.backend.get_vocab()
    ends = [vocabulary["<|im_end|>"], vocabulary["<|endoftext|>"]]
    assert load_model_config(directory).eos_token_ids == tuple(ends)
    assert mine.decode([*ends, vocabulary["a"]]) == "a"
    asked = [{"role": "user", "content": "hi <|im_end|>"}]
    assert mine.chat_ids(asked).count(ends[0]) == 1


def test_the_unknown_token_is_no_text(write: Callable[..., Path]) -> None:
    mine = tokenizer_of_file(write(add_sentence_pieces))
    assert mine.decode([0]) == ""


def test_tokens_are_at_most_so_long(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"m.gguf: tokenizer.ggml.tokens has .*, as 2; must have at most 1024"
    ):
        Vocabulary(vocabulary_of(tmp_path, ["a" * 1024, "b" * 1024, "a" * 65_000]))


def test_merges_take_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part of a long token may be a token, and there are as many merges of it."""
    monkeypatch.setattr("alignedserve.models.gguf.tokenizer.MAX_MERGED", 1 << 20)
    header = vocabulary_of(tmp_path, ["a" * length for length in range(1, 1025)])
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="more than 1048576 letters together"):
            tokenizer_of(header)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # All of them have 358 million letters.
    assert peak < 16 << 20


def vocabulary_of(tmp_path: Path, tokens: list[str]) -> Header:
    values = {"model": "llama", "tokens": tokens, "scores": np.zeros(len(tokens), np.float32)}
    return Header(tmp_path / "m.gguf", {f"tokenizer.ggml.{key}": value for key, value in values.items()}, {})


def test_named_templates_are_read(write: Callable[..., Path]) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        add_byte_level(writer)
        del writer.kv_data[0]["tokenizer.chat_template"]
        writer.add_chat_template(
            [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
        )

    mine = tokenizer_of_file(write(change))
    asked = [{"role": "user", "content": "hi"}]
    assert mine.apply_chat_template(asked) == "plain"
    assert mine.apply_chat_template(asked, tools=[{"type": "function"}]) == "tools"


def set_list(name: str, values: list[Any]) -> Callable[[gguf.GGUFWriter], None]:
    def change(writer: gguf.GGUFWriter) -> None:
        add_byte_level(writer)
        del writer.kv_data[0][f"tokenizer.ggml.{name}"]
        writer.add_array(f"tokenizer.ggml.{name}", values)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda writer: add_byte_level(writer, "poro-chat"),
            "tokenizer.ggml.pre is 'poro-chat'; must be one of codeshell",
        ),
        (
            lambda writer: add_byte_level(writer, None),
            "tokenizer.ggml.pre is missing; must be one of codeshell",
        ),
        (
            lambda writer: add_byte_level(writer, merges=["a"]),
            "tokenizer.ggml.merges has 'a', as 0; must be two",
        ),
        (lambda writer: add_byte_level(writer, merges=["a ☃"]), "tokenizer.ggml.merges has 'a ☃', as 0"),
        (
            lambda writer: writer.add_tokenizer_model("bert"),
            "tokenizer.ggml.model is 'bert'; must be one of gpt2",
        ),
        (
            lambda writer: writer.add_tokenizer_model("gpt2"),
            "tokenizer.ggml.tokens is missing; must be a list",
        ),
        (set_list("tokens", ["a"] * 376), "tokenizer.ggml.tokens has 'a' twice, as 0 and 375"),
        (set_list("token_type", [1, 1]), "tokenizer.ggml.token_type has 2 entries; must have "),
    ],
)
def test_what_is_wrong_is_named(
    write: Callable[..., Path], change: Callable[[gguf.GGUFWriter], None], message: str
) -> None:
    with pytest.raises(ValueError) as error:
        resolve_model(write(change))
    assert f"model.gguf: {message}" in str(error.value)
