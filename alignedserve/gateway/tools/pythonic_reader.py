"""Parses calls in Python's syntax: `[weather(city="Rome"), clock()]`, as Llama 4 and some Llama 3.2 models write them.

A value is JSON, or a literal of Python. Parsing takes at most 5 ms: a longer list is text.
"""

from __future__ import annotations

import ast
import json
import re

from alignedserve.gateway.tools.calls import DECODER, MAX_HEAD_CHARS, object_of
from alignedserve.gateway.tools.readers import Read, Reader
from alignedserve.gateway.tools.tags import beginnings, spelt

# Limits of a list: its characters; its calls and arguments; and the characters of Python literals that are not JSON,
# without the strings in them.
MAX_CHARS, MAX_PARTS, MAX_PYTHON_CHARS = 1 << 16, 1 << 10, 1 << 11
# Each such literal costs as much as this number of characters besides its own, and each string in it this number.
_CHARS_OF_A_LITERAL, _CHARS_OF_A_TEXT = 8, 2
_AROUND = ("<|python_start|>", "<|python_end|>")
# Blanks and characters of names, for regular expressions. The grammar has the same (keyed_families.py).
BLANKS, LETTERS = r" \t\n\r\f\v", "a-zA-Z0-9_.-"
_BLANKS = " \t\n\r\f\v"
# The start of calls, and what may become it.
_FIRST = [r"\[", f"[{BLANKS}]*", f"[{LETTERS}]+", f"[{BLANKS}]*", r"\("]
_HEAD = re.compile(rf"(?:{re.escape(_AROUND[0])}[{BLANKS}]*)?{''.join(_FIRST)}")
_HEAD_BEGUN = beginnings(_FIRST, [*spelt(_AROUND[0]), f"[{BLANKS}]*", *_FIRST])


class PythonicReader(Reader):
    """Either the whole text is a list of calls, or it is text."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._num_chars = 0
        # Its first characters without leading blanks, until they decide whether calls may follow.
        self._first = ""
        self._is_text = self._is_list = False

    def feed(self, text: str) -> Read:
        if self._is_text:
            return Read.of(text)
        self._text.append(text)
        self._num_chars += len(text)
        if not self._is_list:
            self._first += text if self._first else text.lstrip(_BLANKS)
            self._is_list = _HEAD.match(self._first, 0, MAX_HEAD_CHARS) is not None
            may_be_list = len(self._first) < MAX_HEAD_CHARS and _HEAD_BEGUN.fullmatch(self._first)
            self._is_text = not self._is_list and not may_be_list
        self._is_text |= self._is_list and self._num_chars > MAX_CHARS
        return Read.of(self._taken()) if self._is_text else Read()

    def end(self, *, is_cut: bool = False) -> Read:
        text, read = self._taken(), Read()
        for name, arguments in _calls_in(text):
            read.begin(name, arguments)
        return read if read.pieces else Read.of(text)

    def _taken(self) -> str:
        text = "".join(self._text)
        self._text.clear()
        return text


def _calls_in(text: str) -> list[tuple[str, str]]:
    """Returns names and arguments. Empty if the text has anything else."""
    text = text.strip(_BLANKS).removeprefix(_AROUND[0]).removesuffix(_AROUND[1]).strip(_BLANKS)
    try:
        return _Calls(text).all()
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []


_BRACKET, _CLOSING, _COMMA = re.compile(r"\[\s*"), re.compile(r"\s*\]"), re.compile(r"\s*,\s*")
_NAME = re.compile(rf"([{LETTERS}]+)\s*\(\s*")
_KEY = re.compile(r"""([^\s=()\[\]{},"']+)\s*=\s*""")
_END = re.compile(r"\s*\)")
_VALUE_END = re.compile(r"\s*[,)]")


class _Calls:
    """Parses a list of calls. Names need not be valid in Python: `[f(from="x", a-b=1)]`."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._num_parts = self._num_python_chars = 0

    def all(self) -> list[tuple[str, str]]:
        """Returns the calls. Raises ValueError, or an error of `ast`, if there is anything else."""
        calls: list[tuple[str, str]] = []
        self._past(_BRACKET)
        while self._has_next(_CLOSING, is_first=not calls):
            calls.append(self._call())
        if self._at != len(self._text):
            raise ValueError("more than a list")
        return calls

    def _call(self) -> tuple[str, str]:
        name = self._past(_NAME)[1]
        values: dict[str, str] = {}
        while self._has_next(_END, is_first=not values):
            key = self._past(_KEY)[1]
            values[key] = self._value()
        return name, object_of(values)

    def _has_next(self, end: re.Pattern[str], is_first: bool) -> bool:
        """Passes the comma before the next item, or the end. Returns whether there is an item."""
        if self._may_pass(end):
            return False
        if not is_first:
            self._past(_COMMA)
            if self._may_pass(end):
                return False
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise ValueError("too many calls and arguments")
        return True

    def _value(self) -> str:
        """Returns the value as JSON. If it is JSON, it stays as written."""
        start = self._at
        try:
            _, end = DECODER.raw_decode(self._text, start)
        except ValueError:
            return self._literal()
        if not _VALUE_END.match(self._text, end):
            return self._literal()
        self._at = end
        return self._text[start:end]

    def _literal(self) -> str:
        start, self._at = self._at, self._literal_end()
        written = self._text[start : self._at]
        if not written.strip():
            raise ValueError("a value expected")
        tree = _AsPython().visit(ast.parse(f"({written})", mode="eval").body)
        return json.dumps(ast.literal_eval(tree), ensure_ascii=False, allow_nan=False)

    def _literal_end(self) -> int:
        at, depth = self._at, 0
        self._num_python_chars += _CHARS_OF_A_LITERAL
        while True:
            part = _PART.match(self._text, at)
            if part is None or _F_STRING.match(part[0]):
                raise ValueError("no literal")
            depth += (part[0] in "([{") - (part[0] in ")]}")
            if depth < 0 or (depth == 0 and part[0] == ","):
                return at
            self._num_python_chars += _CHARS_OF_A_TEXT if part["text"] else len(part[0])
            if self._num_python_chars > MAX_PYTHON_CHARS:
                raise ValueError("literals that would take long to parse")
            at = part.end()

    def _past(self, pattern: re.Pattern[str]) -> re.Match[str]:
        found = pattern.match(self._text, self._at)
        if found is None:
            raise ValueError(f"{pattern.pattern} expected")
        self._at = found.end()
        return found

    def _may_pass(self, pattern: re.Pattern[str]) -> bool:
        found = pattern.match(self._text, self._at)
        self._at = found.end() if found else self._at
        return found is not None


# A part of a literal: a string, punctuation, or anything else. F-strings are excluded: their contents would be parsed.
_PART = re.compile(
    r"(?P<text>[a-zA-Z]{0,2}(?:"
    r'"""[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*"""|'
    r"'''[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*'''|"
    r'"[^"\\\n]*(?:\\.[^"\\\n]*)*"|'
    r"'[^'\\\n]*(?:\\.[^'\\\n]*)*'))|"
    r"[()\[\]{},]|\w+|[^\w'\"#()\[\]{},]+",
    re.DOTALL,
)
_F_STRING = re.compile(r"[a-zA-Z]?[fF][a-zA-Z]?[\"']")
_NAMES = {"true": True, "false": False, "null": None}


class _AsPython(ast.NodeTransformer):
    """Replaces JSON's names of True, False and None, and joins surrogate pairs that are written as two escapes."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_NAMES[node.id]) if node.id in _NAMES else node

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if not isinstance(node.value, str):
            return node
        return ast.Constant(node.value.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
