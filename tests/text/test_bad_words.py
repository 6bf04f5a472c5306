"""The tokens of words that an output must not complete."""

from __future__ import annotations

from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers

from alignedserve import demo
from alignedserve.sampling_params import SamplingParams
from alignedserve.text.bad_words import with_bad_word_ids
from alignedserve.text.tokenizer import Tokenizer
from alignedserve.text.tokenizer_files import TokenizerFiles


def ids_of(tokenizer: Tokenizer, *words: str) -> list[list[int]]:
    found = with_bad_word_ids(SamplingParams(bad_words=words, seed=5), tokenizer)
    assert found.seed == 5 and not found.bad_words
    return [[*ids] for ids in found.bad_word_ids or ()]


def test_a_word_counts_with_and_without_a_space_before_it() -> None:
    vocab = {"cat": 0, " cat": 1, " ": 2, "s": 3}
    words = Backend(models.BPE(vocab | {each: 9 + i for i, each in enumerate("cat")}, []))
    words.add_tokens(["cat", " cat", "s"])
    tokenizer = Tokenizer(TokenizerFiles(words, {}, {}))
    plain, spaced = tokenizer.encode("cat"), tokenizer.encode(" cat")
    assert len(plain) == len(spaced) == 1 and plain != spaced
    assert ids_of(tokenizer, "cat") == [plain, spaced]
    # Spaces before a word are no part of it.
    assert ids_of(tokenizer, "  cat") == [plain, spaced]
    assert ids_of(tokenizer, "cats", "s") == [[*plain, 3], [*spaced, 3], [3]]


def test_a_space_that_is_a_token_of_its_own_makes_no_second_way() -> None:
    tokenizer = Tokenizer.from_directory(demo.MODEL_DIR)
    # One token per byte, and one for a space.
    assert ids_of(tokenizer, "zq") == [[127, 118]]
    assert ids_of(tokenizer, "one") == [[116, 115, 106]]
    assert ids_of(tokenizer, "日本") == [[235, 156, 170, 235, 161, 177]]


def test_a_tokenizer_that_adds_the_space_itself_has_one_way() -> None:
    """As that of Llama 2."""
    backend = Backend(models.WordLevel({"▁cat": 0, "?": 1}, "?"))
    backend.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.Prepend("▁")])
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    assert ids_of(Tokenizer(TokenizerFiles(backend, {}, {})), "cat") == [[0]]
