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
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from alignedserve.structured_outputs import StructuredOutputsParams, Thoughts
from alignedserve.text.tokenizer import Tokenizer
from alignedserve.types import InvalidRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Compiled grammars that are kept. A typical one takes a few hundred KB.
MAX_KEPT = 128
# Special tokens in the text around an output; all else is plain text.
_TOKEN = re.compile(r"(<\|\w+\|>)")
# Whitespace is allowed only as json.dumps writes it. Otherwise a small model could generate it forever.
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class GrammarError(RuntimeError):
    """The grammar is too complex, or the output so far does not match it."""


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

    def matcher(self, wanted: StructuredOutputsParams, owner: str = "") -> Matcher:
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
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return compiled.deep_copy()

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
            found = LLMatcher(self._vocabulary(), _source(wanted), log_level=0)
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


def _source(wanted: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    if wanted.thoughts:
        return LLMatcher.grammar_from_lark(_after_thoughts(wanted, wanted.thoughts))
    options: Any = _JSON_OPTIONS
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
    return LLMatcher.grammar_from_lark(_as_lark(str(wanted.grammar)))


def _after_thoughts(wanted: StructuredOutputsParams, thoughts: Thoughts) -> str:
    """Returns a grammar of free thoughts up to their closing tag, and of the output after them."""
    first = f"({_terminals(thoughts.open)} thoughts GAP)?" if thoughts.open else "thoughts GAP"
    # A token ends free text at any place. A text ends it at its first occurrence.
    lazy = "" if _TOKEN.match(thoughts.close) else "[lazy]"
    return "\n".join(
        (
            f"start: {first} {_terminals(thoughts.opening)} {_part(wanted)}",
            f"thoughts{lazy}: TEXT {_terminals(thoughts.close)}",
            r"TEXT: /(.|\n)*/",
            r"GAP: /[ \t\r\n]*/",
        )
    )


def _terminals(text: str) -> str:
    """Returns the text for a rule, with its `<|…|>` as tokens."""
    parts = filter(None, _TOKEN.split(text))
    return " ".join(part if _TOKEN.fullmatch(part) else json.dumps(part) for part in parts)


def _part(wanted: StructuredOutputsParams) -> str:
    """Returns the rule's part for the output."""
    match wanted.kind:
        case "json" | "json_object":
            schema = json.loads(str(wanted.json)) if wanted.kind == "json" else {"type": "object"}
            if not isinstance(schema, dict):
                schema = {"allOf": [schema]}
            # A grammar that contains `::=` would be taken for GBNF.
            return "%json " + json.dumps(schema | {"x-guidance": _JSON_OPTIONS}).replace("::=", ":\\u003a=")
        case "regex":
            # A regex stands between slashes, in one line.
            escaped = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", str(wanted.regex), flags=re.DOTALL)
            return "/" + escaped.replace("\n", "\\n") + "/"
        case "choice":
            return "(" + " | ".join(json.dumps(each) for each in wanted.choice or []) + ")"
    return "%lark {\n" + _as_lark(str(wanted.grammar)) + "\n}"


def _as_lark(grammar: str) -> str:
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

    if "::=" not in grammar:
        return grammar
    try:
        return gbnf_to_lark(grammar)
    except (GbnfToLarkError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _invalid(wanted: StructuredOutputsParams, reason: str) -> InvalidRequest:
    return InvalidRequest(f"structured_outputs.{wanted.kind}: {_first_line(reason)}")


def _first_line(reason: str) -> str:
    """Returns the first line. The others are the parser's long state."""
    line = reason.strip().split("\n")[0][:500]
    return "it allows no output" if line == "NoExtensionBias" else line
