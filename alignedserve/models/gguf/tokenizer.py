"""The tokenizer.json and tokenizer_config.json of the vocabulary in a GGUF file."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from alignedserve.models.fields import Fields, shown
from alignedserve.models.gguf.config import CONTROL, NORMAL, UNKNOWN, USER_DEFINED, kinds_of
from alignedserve.models.gguf.container import MAX_STRINGS, Header
from alignedserve.models.gguf.pre_tokenizers import (
    BEGINS_WITH_BOS,
    IGNORES_MERGES,
    MADE_OF_NFC,
    PRE_TOKENIZERS,
    pre_tokenizer,
)

# The longest known have 256.
MAX_TOKEN_BYTES = 1024
# Letters of all merges together. Gemma's vocabulary of 262,144 needs 9 million.
MAX_MERGED = 1 << 26
# In place of a space.
SPACE = "\u2581"
_KEYS = "tokenizer.ggml."
# Only these of Phi-3's control tokens leave the space after them alone.
_PHI3_KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>")


class Vocabulary:
    """A header's tokens. Raises ValueError if its lists contradict each other."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self.fields = Fields(header.metadata, str(header.path))
        self.architecture = header.metadata.get("general.architecture")
        self.model = self.fields.choice(f"{_KEYS}model", {"gpt2": "gpt2", "llama": "llama"}, "")
        self.tokens = self._list("tokens", str)
        self.ids = {token: number for number, token in enumerate(self.tokens)}
        if len(self.ids) < len(self.tokens):
            self._refuse_repeated()
        self._refuse_long()
        self.kinds = kinds_of(header, len(self.tokens)) or [NORMAL] * len(self.tokens)

    def _list(self, key: str, of: type) -> list[Any]:
        found = self.fields.get(_KEYS + key)
        if not isinstance(found, list) or not all(isinstance(each, of) for each in found):
            raise self.fields.error(_KEYS + key, "a list of strings")
        return found

    def _refuse_repeated(self) -> None:
        for number, token in enumerate(self.tokens):
            if self.ids[token] != number:
                raise ValueError(
                    f"{self.fields.where}: {_KEYS}tokens has {shown(token)} twice, as {number} and {self.ids[token]}"
                )

    def _refuse_long(self) -> None:
        for number, token in enumerate(self.tokens):
            if len(token.encode()) > MAX_TOKEN_BYTES:
                raise ValueError(
                    f"{self.fields.where}: {_KEYS}tokens has {shown(token)}, as {number}; "
                    f"must have at most {MAX_TOKEN_BYTES} bytes"
                )

    @property
    def merges(self) -> list[list[str]]:
        merges = [merge.split(" ") for merge in self._list("merges", str)]
        for number, merge in enumerate(merges):
            if len(merge) != 2 or any(part not in self.ids for part in (*merge, "".join(merge))):
                raise ValueError(
                    f"{self.fields.where}: {_KEYS}merges has {shown(' '.join(merge))}, as {number}; "
                    "must be two tokens that form a third"
                )
        return merges

    @property
    def scores(self) -> list[float]:
        found = self._header.numbers(f"{_KEYS}scores", len(self.tokens))
        if found is None:
            raise self.fields.error(f"{_KEYS}scores", f"{len(self.tokens)} numbers")
        scores: list[float] = found.tolist()
        return scores

    def token(self, key: str) -> str | None:
        """Returns the text of the token that this key gives the id of."""
        number = self.fields.token_id(f"{_KEYS}{key}_token_id")
        if number is not None and number >= len(self.tokens):
            raise self.fields.error(f"{_KEYS}{key}_token_id", f"below {len(self.tokens)}")
        return None if number is None else self.tokens[number]

    def flag(self, key: str, default: bool) -> bool:
        return self.fields.flag(_KEYS + key, default)

    @property
    def pre(self) -> str:
        return self.fields.choice(f"{_KEYS}pre", PRE_TOKENIZERS, "")

    @property
    def adds(self) -> tuple[str | None, str | None]:
        """The tokens that are added before and after a text."""
        by_default = self.model == "llama" or self.pre in BEGINS_WITH_BOS
        adds_bos = self.flag("add_bos_token", by_default)
        return (
            self.token("bos") if adds_bos else None,
            self.token("eos") if self.flag("add_eos_token", False) else None,
        )


def has_tokenizer(header: Header) -> bool:
    model = header.metadata.get(f"{_KEYS}model")
    return model is not None and not (isinstance(model, str) and model in ("none", "no_vocab"))


def tokenizer_of(header: Header) -> dict[str, Any]:
    """Returns tokenizer.json. Raises ValueError if the kind of tokenizer is not supported."""
    vocabulary = Vocabulary(header)
    parts = _byte_level(vocabulary) if vocabulary.model == "gpt2" else _sentence_pieces(vocabulary)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [*_added_tokens(vocabulary)],
        "post_processor": _post_processor(vocabulary),
        **parts,
    }


def _added_tokens(vocabulary: Vocabulary) -> Iterable[dict[str, Any]]:
    is_phi3 = vocabulary.architecture == "phi3" and vocabulary.model == "llama"
    for number, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True)):
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) and token:
            yield {
                "id": number,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": is_phi3 and kind == CONTROL and token not in _PHI3_KEEPS_SPACE,
                "normalized": False,
                "special": kind != USER_DEFINED,
            }


def _post_processor(vocabulary: Vocabulary) -> dict[str, Any]:
    bos, eos = vocabulary.adds

    def template(*sequences: str) -> list[dict[str, Any]]:
        added = {text: {"SpecialToken": {"id": text, "type_id": 0}} for text in (bos, eos) if text}
        parts: list[dict[str, Any]] = []
        for type_id, name in enumerate(sequences):
            middle = {"Sequence": {"id": name, "type_id": type_id}}
            parts += ([added[bos]] if bos else []) + [middle] + ([added[eos]] if eos else [])
        return parts

    return {
        "type": "TemplateProcessing",
        "single": template("A"),
        "pair": template("A", "B"),
        "special_tokens": {
            text: {"id": text, "ids": [vocabulary.ids[text]], "tokens": [text]} for text in (bos, eos) if text
        },
    }


def _byte_level(vocabulary: Vocabulary) -> dict[str, Any]:
    """GPT-2's kind: words by a pattern, then merges of bytes, each of which is a letter."""
    pre = vocabulary.pre
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "normalizer": {"type": "NFC"} if pre in MADE_OF_NFC else None,
        "pre_tokenizer": pre_tokenizer(pre),
        "decoder": byte_level,
        "model": _bpe(vocabulary, vocabulary.merges, ignore_merges=pre in IGNORES_MERGES),
    }


def _sentence_pieces(vocabulary: Vocabulary) -> dict[str, Any]:
    """SentencePiece's kind: merges by score, of the text in one piece, and bytes for what has no token."""
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    normalizers: list[dict[str, Any]] = [replace]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if vocabulary.flag("add_space_prefix", True):
        normalizers.insert(0, {"type": "Prepend", "prepend": SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            vocabulary,
            _merges_by_score(vocabulary),
            unk_token=vocabulary.token("unknown"),
            fuse_unk=True,
            byte_fallback=True,
        ),
    }


def _merges_by_score(vocabulary: Vocabulary) -> list[list[str]]:
    """Each way to put a token together of two others, the highest score of the result first."""
    ids, found, num_letters = vocabulary.ids, [], 0
    for token, kind, score in zip(vocabulary.tokens, vocabulary.kinds, vocabulary.scores, strict=True):
        if kind != NORMAL:
            continue
        pairs = ((token[:at], token[at:]) for at in range(1, len(token)) if token[:at] in ids)
        known = [(left, right) for left, right in pairs if right in ids]
        known.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        found += [(score, left, right) for left, right in known]
        num_letters += len(known) * len(token)
        if len(found) > MAX_STRINGS or num_letters > MAX_MERGED:
            raise ValueError(
                f"{vocabulary.fields.where}: its tokens make more than {MAX_STRINGS} merges, or ones of more than "
                f"{MAX_MERGED} letters together"
            )
    found.sort(key=lambda each: each[0], reverse=True)
    return [[left, right] for _, left, right in found]


def _bpe(vocabulary: Vocabulary, merges: list[list[str]], **options: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **options,
        "vocab": vocabulary.ids,
        "merges": merges,
    }


def tokenizer_config_of(header: Header) -> dict[str, Any]:
    vocabulary = Vocabulary(header)
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {f"{name}_token": vocabulary.token(key) for name, key in named.items()}
    bos, eos = vocabulary.adds
    config: dict[str, Any] = {key: token for key, token in special.items() if token}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {"add_bos_token": bos is not None, "add_eos_token": eos is not None}
    if templates := _chat_templates(header):
        config["chat_template"] = templates
    return config


def _chat_templates(header: Header) -> list[dict[str, str]]:
    prefix = "tokenizer.chat_template"
    found = {
        key.removeprefix(prefix).removeprefix(".") or "default": value
        for key, value in header.metadata.items()
        if re.fullmatch(re.escape(prefix) + r"(\.\w+)?", key) and isinstance(value, str)
    }
    return [{"name": name, "template": template} for name, template in found.items()]
