"""Parses calls that are written as Python: `[weather(city="Rome"), clock()]`, as Llama 4 and some of Llama 3.2 do."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from typing import Never

from alignedserve.gateway.tools.calls import MAX_HEAD_CHARS, Read
from alignedserve.gateway.tools.readers import Reader
from alignedserve.gateway.tools.tags import beginnings, spelt

# Parsing a longer text could take long.
_MAX_CHARS = 1 << 16
_NAMES = {"true": True, "false": False, "null": None}
_AROUND = ("<|python_start|>", "<|python_end|>")
# How calls begin, and what may become that.
_HEAD = re.compile(rf"(?:{re.escape(_AROUND[0])}\s*)?\[\s*[\w.-]+\s*\(")
_FIRST = [r"\[", r"\s*", r"[\w.-]+", r"\s*", r"\("]
_HEAD_BEGUN = beginnings(_FIRST, [*spelt(_AROUND[0]), r"\s*", *_FIRST])


class PythonicReader(Reader):
    """The whole of the text is a list of calls, or it is text."""

    def __init__(self) -> None:
        self._text: list[str] = []
        # Its first letters, without the blanks before them, until they say whether calls may come.
        self._first = ""
        self._is_text = self._is_list = False

    def feed(self, text: str) -> Read:
        if self._is_text:
            return Read.of(text)
        self._text.append(text)
        if not self._is_list:
            self._first += text if self._first else text.lstrip()
            self._is_list = _HEAD.match(self._first, 0, MAX_HEAD_CHARS) is not None
            may_be_list = len(self._first) < MAX_HEAD_CHARS and _HEAD_BEGUN.fullmatch(self._first)
            self._is_text = not self._is_list and not may_be_list
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
    """Returns names and arguments; nothing if the text is anything else than calls."""
    if len(text) > _MAX_CHARS:
        return []
    text = text.strip().removeprefix(_AROUND[0]).removesuffix(_AROUND[1]).strip()
    with contextlib.suppress(ValueError, RecursionError):
        return _Json(text).calls()
    try:
        found = ast.parse(text, mode="eval").body
        return [_call(each) for each in found.elts] if isinstance(found, ast.List) else []
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


_BRACKET, _CLOSING, _COMMA = re.compile(r"\[\s*"), re.compile(r"\s*\]"), re.compile(r"\s*,\s*")
_NAME = re.compile(r"([\w.-]+)\s*\(\s*")
_KEY = re.compile(r"""([^\s=()\[\]{},"']+)\s*=\s*""")
_END = re.compile(r"\s*\)")


def _refuse(constant: str) -> Never:
    raise ValueError(f"{constant} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


class _Json:
    """Reads a list of calls in which all values are JSON. Names need be none of Python's: `[f(from="x", a-b=1)]`."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def calls(self) -> list[tuple[str, str]]:
        """Raises ValueError for anything else."""
        self._past(_BRACKET)
        calls = [self._call()]
        while self._may_pass(_COMMA):
            calls.append(self._call())
        self._past(_CLOSING)
        if self._at != len(self._text):
            raise ValueError("more than a list")
        return calls

    def _call(self) -> tuple[str, str]:
        name, values = self._past(_NAME)[1], {}
        is_first = True
        while not self._may_pass(_END):
            if not is_first:
                self._past(_COMMA)
            key, start = self._past(_KEY)[1], self._at
            _, self._at = _DECODER.raw_decode(self._text, start)
            # (As it is written.)
            values[key], is_first = self._text[start : self._at], False
        body = ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in values.items())
        return name, f"{{{body}}}"

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


class _AsPython(ast.NodeTransformer):
    """JSON's names for what Python calls True, False and None, and surrogate pairs written as two escapes."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_NAMES[node.id]) if node.id in _NAMES else node

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if not isinstance(node.value, str):
            return node
        return ast.Constant(node.value.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def _call(node: ast.expr) -> tuple[str, str]:
    """Raises ValueError if it is no call with literals by name."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call")
    arguments = {}
    for each in node.keywords:
        if each.arg is None:
            raise ValueError("an argument without a name")
        arguments[each.arg] = ast.literal_eval(_AsPython().visit(each.value))
    try:
        return ast.unparse(node.func), json.dumps(arguments, ensure_ascii=False)
    except TypeError as error:
        raise ValueError("a value that JSON has not") from error
