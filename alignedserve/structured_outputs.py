"""The form that the output must have. Names are vLLM's. text/grammar.py enforces it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from alignedserve.types import InvalidRequest, is_text


@dataclass(frozen=True)
class Thoughts:
    """The tags around a model's thoughts, which may come before an output of required form."""

    close: str
    # None: the prompt has opened the thoughts. Otherwise the output may open them, or have none.
    open: str | None = None
    # Text after the thoughts that opens the output.
    opening: str = ""


@dataclass(kw_only=True)
class StructuredOutputsParams:
    """Exactly one kind of constraint must be given."""

    # a JSON schema, as text or as an object
    json: str | dict[str, Any] | None = None
    # the whole output matches it
    regex: str | None = None
    # the output is one of these
    choice: list[str] | None = None
    # in llguidance's variant of Lark, or in GBNF
    grammar: str | None = None
    # True: any JSON object
    json_object: bool | None = None
    # free text, with tags in it that have a form: vLLM's and xgrammar's, as text or as an object
    structural_tag: str | dict[str, Any] | None = None

    # What may come before the output.
    thoughts: Thoughts | None = None

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidRequest(
                f"structured_outputs: exactly one of {', '.join(KINDS)} must be given, not "
                f"{' and '.join(given) or 'none'}"
            )
        if isinstance(self.json, dict):
            self.json = _as_text("json", self.json)
        if isinstance(self.structural_tag, dict):
            self.structural_tag = _as_text("structural_tag", self.structural_tag)
        for name in ("json", "regex", "grammar", "structural_tag"):
            text = getattr(self, name)
            if text is not None and not is_text(text):
                raise InvalidRequest(f"structured_outputs.{name}={text!r}: must be a string")
        if self.choice is not None and not _are_texts(self.choice):
            raise InvalidRequest("structured_outputs.choice: must be a list of at least one non-empty string")
        if self.json_object is not None and self.json_object is not True:
            raise InvalidRequest(f"structured_outputs.json_object={self.json_object!r}: must be True")

    @property
    def kind(self) -> str:
        return next(name for name in KINDS if getattr(self, name) is not None)

    @property
    def identity(self) -> tuple[str, str, Thoughts | None]:
        """Equal for two objects with the same meaning."""
        return self.kind, self.text, self.thoughts

    @property
    def text(self) -> str:
        value = getattr(self, self.kind)
        return str(value) if self.kind in ("json", "structural_tag") else json.dumps(value)


KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def _as_text(name: str, value: dict[str, Any]) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"structured_outputs.{name}: must be JSON: {error}") from error


def _are_texts(values: object) -> bool:
    return isinstance(values, list) and bool(values) and all(is_text(each) and each for each in values)
