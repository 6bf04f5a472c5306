"""How byte-level tokenizers divide a text into words, by the name in `tokenizer.ggml.pre`."""

from __future__ import annotations

from typing import Any

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE, _REST = r"[^\r\n\p{L}\p{N}]?", r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_O200K = (
    f"{_BEFORE}{_UPPER}*{_LOWER}+{_ENDINGS}?|{_BEFORE}{_UPPER}+{_LOWER}*{_ENDINGS}?" + r"|\p{N}{1,3}" + _REST
)
_TEKKEN = f"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*" + r"|\p{N}" + _REST

_PATTERNS = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais"), _GPT2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), _O200K),
    "tekken": _TEKKEN,
}
# GPT-2's, with each digit a word.
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
PRE_TOKENIZERS = {name: name for name in sorted((*_PATTERNS, *_SINGLE_DIGITS))}
# Whether a word that is a token is that token, even if no merges lead to it.
IGNORES_MERGES = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken")
# Whether a text begins with the token `bos` if the file does not say so.
BEGINS_WITH_BOS = IGNORES_MERGES
# Whether the text is composed first.
MADE_OF_NFC = ("qwen2", "deepseek-r1-qwen", "megrez")


def pre_tokenizer(name: str) -> dict[str, Any]:
    """Returns the part of tokenizer.json."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    if name in _SINGLE_DIGITS:
        digits = {"type": "Digits", "individual_digits": True}
        return {"type": "Sequence", "pretokenizers": [digits, byte_level | {"use_regex": True}]}
    split = {
        "type": "Split",
        "pattern": {"Regex": _PATTERNS[name]},
        "behavior": "Isolated",
        "invert": False,
    }
    return {"type": "Sequence", "pretokenizers": [split, byte_level | {"use_regex": False}]}
