"""The base of families of models that write calls in one format, and the grammar that constrains those calls."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

from alignedserve.gateway.tools.bodies import Function, Tool
from alignedserve.gateway.tools.keyed_grammar import JsonRules, json_rule, rule
from alignedserve.gateway.tools.schemas import Document
from alignedserve.structured_outputs import StructuredOutputsParams
from alignedserve.types import InvalidRequest

# Returns the id of a text that is one special token. None: it is not.
SpecialId = Callable[[str], int | None]


class Family(ABC):
    # The marks around calls, which may be special tokens.
    marks: Sequence[str] = ()

    def __init__(self, special_id: SpecialId) -> None:
        self._special_id = special_id

    @property
    def has_special_marks(self) -> bool:
        return any(self._special_id(mark) is not None for mark in self.marks)

    def structure(
        self, tools: Sequence[Tool], one_at_most: bool, max_bytes: int
    ) -> StructuredOutputsParams | None:
        """Returns the grammar of the text. None: it needs or has none. Raises InvalidRequest."""
        if not one_at_most and not any(tool.function.strict for tool in tools):
            return None
        names = [tool.function.name for tool in tools]
        return self._grammar(self._rules(one_at_most, names), [tool.function for tool in tools], max_bytes)

    def _grammar(
        self, rules: Iterable[str], functions: Sequence[Function], max_bytes: int
    ) -> StructuredOutputsParams:
        calls = rule("call", " | ".join(f"call_{n}" for n in range(len(functions))))
        shared = JsonRules(max_bytes)
        each = (self._call_rules(number, function, shared) for number, function in enumerate(functions))
        found, num_bytes = [], 0
        try:
            for text in chain(rules, [calls], chain.from_iterable(each)):
                found.append(text)
                num_bytes += len(text) + 1
                if num_bytes > max_bytes:
                    raise InvalidRequest(f"tools: their grammar has more than {max_bytes} bytes")
        except RecursionError:
            raise InvalidRequest("tools: a schema is nested too deeply") from None
        return StructuredOutputsParams(grammar="\n".join(found))

    @abstractmethod
    def _rules(self, one_at_most: bool, names: Sequence[str]) -> list[str]:
        """Returns the grammar's rules around `call`. `names` are the functions' names."""

    def _call_rules(self, number: int, function: Function, shared: JsonRules) -> Iterable[str]:
        """Returns the rules of calls of the function with this number."""
        before, after = self._around(function.name)
        asked: dict[str, Any] = {"type": "object"}
        if function.strict and function.parameters:
            asked |= Document(function.parameters).part(function.parameters)
        return [
            rule(f"call_{number}", f"{before} arguments_{number} {after}".rstrip()),
            rule(f"arguments_{number}", json_rule(asked)),
        ]

    def _around(self, name: str) -> tuple[str, str]:
        """Returns the grammar of a call's text before and after its arguments."""
        return json.dumps(f'{{"name": "{name}", "arguments": '), '"}"'

    def _mark(self, mark: str) -> str:
        """Returns the mark as it is written in a rule."""
        token_id = self._special_id(mark)
        return json.dumps(mark) if token_id is None else f"<[{token_id}]>"

    def _marked(self, calls: Sequence[tuple[str, str]], is_repeated: bool) -> list[str]:
        """Returns the rules of free text in which any of `calls` may begin: a mark, and what follows it."""
        begun = " | ".join(f"opening_{n} {after}" for n, (_, after) in enumerate(calls))
        return [
            rule("start", f"({begun})* text" if is_repeated else f"{begun} | text"),
            *(self._up_to(f"opening_{n}", mark) for n, (mark, _) in enumerate(calls)),
            rule("text", "TEXT"),
            rule("TEXT", r"/(.|\n)*/"),
            BLANKS,
        ]

    def _up_to(self, name: str, mark: str, free: str = "TEXT") -> str:
        """Returns the rule `name`: free text up to the mark, and the mark. A mark between slashes is a regular
        expression."""
        if mark.startswith("/"):
            return rule(f"{name}[lazy]", f"{free} {mark}")
        # A special token ends free text wherever it occurs; a text does so at its first occurrence.
        lazy = "" if self._special_id(mark) is not None else "[lazy]"
        return rule(f"{name}{lazy}", f"{free} {self._mark(mark)}")


# Blanks that models write between marks and calls, or omit. They are bounded, because a small model could repeat them
# without end.
BLANKS = rule("BLANKS", r"/[ \n]{0,8}/")
