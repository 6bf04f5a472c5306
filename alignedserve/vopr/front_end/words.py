"""The simulated model as gateways and clients see it: each token is a word, and an answer is a function of its seed
(alignedserve/sim/model.py)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import tokenizers
from tokenizers import pre_tokenizers
from tokenizers.models import WordLevel

from alignedserve.engine.request import Vocabulary
from alignedserve.gateway.model.served_model import ServedModel
from alignedserve.sim.model import VOCABULARY, finish_reason, sample, seed_for
from alignedserve.text.tokenizer import Tokenizer
from alignedserve.text.tokenizer_files import TokenizerFiles

NAME = "virtual"
_TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


def _tokenizer() -> Tokenizer:
    """Returns a new tokenizer for each system: a tokenizer's cache must not make a second run differ from the first."""
    words = {_word(token_id): token_id for token_id in range(VOCABULARY)}
    backend = tokenizers.Tokenizer(WordLevel(words, unk_token=_word(0)))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Tokenizer(TokenizerFiles(backend, {}, {"default": _TEMPLATE}), NAME)


def served_model(max_model_len: int) -> ServedModel:
    return ServedModel(NAME, _tokenizer(), Vocabulary(VOCABULARY, frozenset()), max_model_len)


@dataclass(frozen=True)
class Question:
    """A prompt of `num_words` words, with the seed and the limit that determine its answer."""

    num_words: int
    seed: int
    max_tokens: int
    max_model_len: int

    @classmethod
    def of(cls, number: int, num_words: int, answer_len: int, max_model_len: int) -> Question:
        """Returns a question. Questions with different numbers have different answers."""
        return cls(num_words, seed_for(answer_len, number), max_model_len - num_words, max_model_len)

    @property
    def prompt(self) -> str:
        return " ".join(_word(number) for number in range(self.num_words))

    @property
    def answer(self) -> tuple[str, str]:
        """The text of the answer, and its finish reason. A final token that stops the answer is not shown."""
        tokens, reason = self._output
        return " ".join(map(_word, tokens[:-1] if reason == "stop" else tokens)), reason

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the answer."""
        return len(self._output[0])

    @cached_property
    def _output(self) -> tuple[list[int], str]:
        tokens: list[int] = []
        reason = None
        while reason is None:
            tokens.append(sample(self.seed, len(tokens)))
            reason = finish_reason(
                self.seed, self.num_words, self.max_tokens, len(tokens), self.max_model_len
            )
        return tokens, reason


def _word(token_id: int) -> str:
    return f"t{token_id}"
