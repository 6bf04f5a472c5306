"""Which tokens may come next under a grammar: a JSON schema, a regular expression, a list of choices, or a grammar in
text form. llguidance computes it.

The result depends only on the output so far. A process that continues a request, after preemption or the death of
another process, needs only its tokens: a matcher consumes those that it has not seen.

llguidance limits steps of work rather than seconds. A grammar that is too complex ends in the same error on every
machine.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from alignedserve.structured_outputs import StructuredOutputsParams, Thoughts
from alignedserve.text.lark import (
    JSON_OPTIONS,
    USUAL_TOKEN,
    as_lark,
    grammar_part,
    json_part,
    regex_part,
    terminals,
)
from alignedserve.text.structural_tags import lark_of
from alignedserve.text.tokenizer import Tokenizer
from alignedserve.types import InvalidRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Compiled grammars that are kept, of all owners. A typical one takes a few hundred KB.
MAX_KEPT = 128


class GrammarError(RuntimeError):
    """The grammar is too complex, the output so far does not match it, or no token may come next."""


class Grammars:
    """The compiled grammars of one model. Thread-safe."""

    def __init__(
        self, tokenizer: Callable[[], Tokenizer | None], vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        """`tokenizer` is called for the first grammar."""
        self._load = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        # By the token's text. Set with the tokenizer.
        self._special_ids: dict[str, int] = {}
        # By owner and grammar: otherwise the time to the first token would tell what other owners use.
        self._kept: OrderedDict[tuple[str, object], LLMatcher] = OrderedDict()
        self._lock = Lock()
        self._taking_in = Lock()

    def prepare(self) -> None:
        """Loads the vocabulary, if this model can have grammars. A large one takes seconds. Without this the first
        request with a grammar waits for it, and requests in its batch wait, too."""
        with contextlib.suppress(InvalidRequest):
            self._vocabulary()

    def check(self, wanted: StructuredOutputsParams) -> None:
        """Compiles the grammar. Raises InvalidRequest with the reason if it is invalid."""
        self.compiled(wanted)

    def matcher(self, wanted: StructuredOutputsParams, owner: str) -> Matcher:
        """Returns a matcher without compiling. It is ready if `owner` has used this grammar and it is kept."""
        return Matcher(self, wanted, owner, self._kept_one(wanted, owner))

    def compiled(self, wanted: StructuredOutputsParams, owner: str = "") -> LLMatcher:
        """Returns a matcher at its start. It belongs to the caller."""
        kept = self._kept_one(wanted, owner)
        if kept is not None:
            return kept
        compiled = self._compile(wanted)
        with self._lock:
            self._kept[owner, wanted.identity] = compiled
            if len(self._kept) > MAX_KEPT:
                del self._kept[self._oldest_of_most()]
        return compiled.deep_copy()

    def _oldest_of_most(self) -> tuple[str, object]:
        """Returns the least recently used key of the owner with the most keys."""
        counts = Counter(owner for owner, _ in self._kept)
        most = max(counts.values())
        return next(key for key in self._kept if counts[key[0]] == most)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def _kept_one(self, wanted: StructuredOutputsParams, owner: str) -> LLMatcher | None:
        """Returns a copy of the kept matcher, if there is one."""
        key = owner, wanted.identity
        with self._lock:
            kept = self._kept.get(key)
            if kept is None:
                return None
            self._kept.move_to_end(key)
        return kept.deep_copy()

    def _compile(self, wanted: StructuredOutputsParams) -> LLMatcher:
        from llguidance import LLMatcher

        try:
            vocabulary = self._vocabulary()
            found = LLMatcher(vocabulary, _source(wanted, self._special_ids), log_level=0)
        except ValueError as error:
            raise _invalid(wanted, str(error)) from error
        if not found.is_error():
            # Finds errors that occur only with the first token, before the model starts.
            found.compute_bitmask()
        if found.is_error():
            raise _invalid(wanted, found.get_error())
        return found

    def _vocabulary(self) -> LLTokenizer:
        with self._taking_in:
            if self._tokenizer is None:
                try:
                    self._tokenizer = self._take_in()
                except ValueError as error:
                    raise InvalidRequest(
                        f"structured_outputs: not possible with this model: {error}"
                    ) from error
            return self._tokenizer

    def _take_in(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        tokenizer = self._load()
        if tokenizer is None or not self._eos_token_ids:
            raise ValueError("needs a tokenizer and an end of sequence, and one of them is missing")
        for token_id in tokenizer.special_ids:
            if text := tokenizer.backend.id_to_token(token_id):
                self._special_ids[text] = token_id
        return LLTokenizer(
            tokenizer.backend.to_str(), n_vocab=self._vocab_size, eos_token=self._eos_token_ids
        )


class Matcher:
    """The state of one request in a grammar."""

    def __init__(
        self, grammars: Grammars, wanted: StructuredOutputsParams, owner: str, state: LLMatcher | None
    ) -> None:
        self._grammars = grammars
        self._wanted = wanted
        self._owner = owner
        self._state = state
        # Why the grammar can't be compiled. Permanent.
        self._failure: InvalidRequest | None = None
        self._num_seen = 0

    @property
    def is_ready(self) -> bool:
        """Whether `allowed` returns or raises without compiling first."""
        return self._state is not None or self._failure is not None

    def prepare(self) -> None:
        """Compiles the grammar, unless it is compiled. May run on any thread, while no other thread uses this
        matcher."""
        if self.is_ready:
            return
        try:
            self._state = self._grammars.compiled(self._wanted, self._owner)
        except InvalidRequest as error:
            self._failure = error

    def allowed(self, output: Sequence[int]) -> NDArray[np.bool_]:
        """Returns for each token whether it may come after `output`. Between calls, `output` may only grow.

        At the end of the grammar only the end of sequence is allowed. Raises GrammarError.
        """
        self.prepare()
        state = self._state
        if state is None:
            raise GrammarError(str(self._failure)) from self._failure
        if not state.consume_tokens(list(output[self._num_seen :])):
            raise self._error()
        self._num_seen = len(output)
        bits = np.frombuffer(state.compute_bitmask(), dtype=np.uint8)
        if state.is_error():
            raise self._error()
        return np.unpackbits(bits, count=self._grammars.vocab_size, bitorder="little").view(np.bool_)

    def _error(self) -> GrammarError:
        assert self._state
        return GrammarError(f"structured_outputs: {_first_line(self._state.get_error())}")


def _source(wanted: StructuredOutputsParams, special_ids: Mapping[str, int]) -> str:
    from llguidance import LLMatcher

    if wanted.thoughts:
        return LLMatcher.grammar_from_lark(_after_thoughts(wanted, wanted.thoughts, special_ids))
    options: Any = JSON_OPTIONS
    match wanted.kind:
        case "json":
            return LLMatcher.grammar_from_json_schema(str(wanted.json), overrides=options)
        case "json_object":
            return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=options)
        case "regex":
            return LLMatcher.grammar_from_regex(str(wanted.regex))
        case "choice":
            # The choices form one terminal, which is an automaton. As rules, two thousand would be too many.
            choices = " | ".join(json.dumps(each) for each in wanted.choice or [])
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
        case "structural_tag":
            return LLMatcher.grammar_from_lark(lark_of(str(wanted.structural_tag), special_ids))
    return LLMatcher.grammar_from_lark(as_lark(str(wanted.grammar)))


def _after_thoughts(
    wanted: StructuredOutputsParams, thoughts: Thoughts, special_ids: Mapping[str, int]
) -> str:
    """Returns a grammar of free thoughts up to their closing tag, and of the output after them."""
    first = f"({terminals(thoughts.open)} thoughts GAP)?" if thoughts.open else "thoughts GAP"
    # A token ends free text at any place. A text ends it at its first occurrence.
    lazy = "" if USUAL_TOKEN.match(thoughts.close) else "[lazy]"
    return "\n".join(
        (
            f"start: {first} {terminals(thoughts.opening)} {_part(wanted, special_ids)}",
            f"thoughts{lazy}: TEXT {terminals(thoughts.close)}",
            r"TEXT: /(.|\n)*/",
            r"GAP: /[ \t\r\n]*/",
        )
    )


def _part(wanted: StructuredOutputsParams, special_ids: Mapping[str, int]) -> str:
    """Returns the rule's part for the output."""
    match wanted.kind:
        case "json":
            return json_part(json.loads(str(wanted.json)))
        case "json_object":
            return json_part({"type": "object"})
        case "regex":
            return regex_part(str(wanted.regex))
        case "choice":
            return "(" + " | ".join(json.dumps(each) for each in wanted.choice or []) + ")"
        case "structural_tag":
            return "%lark {\n" + lark_of(str(wanted.structural_tag), special_ids) + "\n}"
    return grammar_part(str(wanted.grammar))


def _invalid(wanted: StructuredOutputsParams, reason: str) -> InvalidRequest:
    return InvalidRequest(f"structured_outputs.{wanted.kind}: {_first_line(reason)}")


def _first_line(reason: str) -> str:
    """Returns the first line. The others are the parser's long state."""
    line = reason.strip().split("\n")[0][:500]
    return "it allows no output" if line == "NoExtensionBias" else line
