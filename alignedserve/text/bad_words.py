"""The tokens of texts that an output must not complete, as vLLM finds them."""

from __future__ import annotations

from dataclasses import replace

from alignedserve.sampling_params import SamplingParams
from alignedserve.text.tokenizer import Tokenizer


def with_bad_word_ids(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """Returns parameters that have the tokens of `bad_words` in place of their text. Raises ValueError."""
    found = [ids for word in params.bad_words or () for ids in _ways(word.lstrip(), tokenizer)]
    return replace(params, bad_words=None, bad_word_ids=found)


def _ways(word: str, tokenizer: Tokenizer) -> list[list[int]]:
    """Returns the tokens of a word at the start of a text, and of the word after a space if that is another token."""
    plain, spaced = (tokenizer.encode(text, add_special_tokens=False) for text in (word, f" {word}"))
    if not plain:
        return []
    return [plain, spaced] if plain[0] != spaced[0] and len(plain) == len(spaced) else [plain]
