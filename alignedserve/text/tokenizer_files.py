"""The files of a model directory that describe its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from alignedserve.models.fields import Fields, read_json_object
from alignedserve.text.panics import panics_are_errors

SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
FILE = "tokenizer.json"
VOCAB_FILE = "vocab.json"
MERGES_FILE = "merges.txt"


@dataclass(frozen=True)
class TokenizerFiles:
    backend: tokenizers.Tokenizer
    # For example "eos_token": "</s>".
    special_tokens: dict[str, str]
    # The Jinja text of each template by its name.
    chat_templates: dict[str, str]


def read_tokenizer_files(directory: Path) -> TokenizerFiles:
    """Reads the files. Raises ValueError if the directory contains no tokenizer, or one that can't be read."""
    config = _config(directory)
    backend = _backend(directory, config)
    backend.no_truncation()
    backend.no_padding()
    special_tokens = {
        key: _added_token(config, key).content for key in SPECIAL_TOKENS if config.get(key) is not None
    }
    _add_tokens(backend, config)
    if not (directory / FILE).is_file():
        _set_post_processor(backend, config, special_tokens)
    return TokenizerFiles(backend, special_tokens, _chat_templates(directory, config))


def _config(directory: Path) -> Fields:
    path = directory / "tokenizer_config.json"
    values = read_json_object(path) if path.is_file() else {}
    # The older file counts only if the newer key is absent.
    older = directory / "special_tokens_map.json"
    if "added_tokens_decoder" not in values and older.is_file():
        values |= read_json_object(older)
    return Fields(values, str(path))


def _backend(directory: Path, config: Fields) -> tokenizers.Tokenizer:
    path, vocab, merges = directory / FILE, directory / VOCAB_FILE, directory / MERGES_FILE
    try:
        with panics_are_errors():
            if path.is_file():
                return tokenizers.Tokenizer.from_file(str(path))
            if vocab.is_file() and merges.is_file():
                return _byte_level(vocab, merges, config.flag("add_prefix_space", False))
    except ValueError:
        raise
    except Exception as error:
        # The tokenizers library raises bare Exception.
        raise ValueError(f"{directory}: its tokenizer cannot be read: {error}") from error
    raise ValueError(f"{directory} holds no tokenizer; looked for {FILE}, or {VOCAB_FILE} with {MERGES_FILE}")


def _byte_level(vocab: Path, merges: Path, add_prefix_space: bool) -> tokenizers.Tokenizer:
    """Makes GPT-2's tokenizer from its two files. OPT's checkpoints have nothing else."""
    backend = tokenizers.Tokenizer(BPE.from_file(str(vocab), str(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.decoder = decoders.ByteLevel()
    return backend


def _added_token(config: Fields, key: str) -> AddedToken:
    """Returns a token that is given as its text, or as an object with flags."""
    value = config.get(key)
    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False)
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        return _from_object(value, special=True)
    raise config.error(key, "a string or an object with content")


def _from_object(value: Mapping[str, Any], special: bool) -> AddedToken:
    flags = {
        key: bool(value[key]) for key in ("single_word", "lstrip", "rstrip", "normalized") if key in value
    }
    return AddedToken(value["content"], special=special, **flags)


def _add_tokens(backend: tokenizers.Tokenizer, config: Fields) -> None:
    """Adds the tokens that the vocabulary files lack. Their ids must match the declared ones."""
    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token_id, token in sorted(_declared_tokens(config).items()):
        if token.content not in present:
            backend.add_tokens([token])
            present.add(token.content)
        actual = backend.token_to_id(token.content)
        if actual != token_id:
            raise ValueError(
                f"{config.where}: added_tokens_decoder gives {token.content!r} the id {token_id}; "
                f"must be {actual}, which it has in the vocabulary"
            )
    named = [_added_token(config, key) for key in SPECIAL_TOKENS if config.get(key) is not None]
    backend.add_special_tokens([token for token in named if token.content not in present])


def _declared_tokens(config: Fields) -> dict[int, AddedToken]:
    declared = config.nested("added_tokens_decoder")
    try:
        return {
            int(token_id): _from_object(value, special=bool(value.get("special")))
            for token_id, value in (declared.values if declared else {}).items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise config.error("added_tokens_decoder", "an object from ids to objects with content") from error


def _set_post_processor(
    backend: tokenizers.Tokenizer, config: Fields, special_tokens: Mapping[str, str]
) -> None:
    """Makes encode add the special tokens that the config's flags name. Not used for tokenizer.json, which has a
    post-processor."""
    bos = special_tokens.get("bos_token") if config.flag("add_bos_token", False) else None
    eos = special_tokens.get("eos_token") if config.flag("add_eos_token", False) else None
    parts = ([bos] if bos else []) + ["$A"] + ([eos] if eos else [])
    tokens = [(token, backend.token_to_id(token)) for token in {bos, eos} if token]
    backend.post_processor = processors.TemplateProcessing(single=parts, special_tokens=tokens)


def _chat_templates(directory: Path, config: Fields) -> dict[str, str]:
    value = config.get("chat_template")
    templates: dict[str, str] = {}
    try:
        if value is not None:
            named = [{"name": "default", "template": value}] if isinstance(value, str) else value
            templates |= {entry["name"]: entry["template"] for entry in named}
    except (KeyError, TypeError) as error:
        allowed = "a string, or a list of objects with name and template"
        raise config.error("chat_template", allowed) from error
    # A template in its own file has priority over one in the config.
    files = {path.stem: path for path in (directory / "additional_chat_templates").glob("*.jinja")}
    if (directory / "chat_template.jinja").is_file():
        files["default"] = directory / "chat_template.jinja"
    return templates | {name: path.read_text(encoding="utf-8") for name, path in files.items()}
