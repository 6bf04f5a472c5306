"""Parses calls that are written as Python: `[weather(city="Rome"), clock()]`, as Llama 4 and some of Llama 3.2 do."""

from __future__ import annotations

import ast
import json
import re

from alignedserve.gateway.tools.calls import MAX_HEAD_CHARS, Read
from alignedserve.gateway.tools.readers import Reader
from alignedserve.gateway.tools.tags import beginnings, spelt

# Parsing a longer text could take long.
_MAX_CHARS = 1 << 16
_AROUND = ("<|python_start|>", "<|python_end|>")
# How calls begin, and what may become that.
_HEAD = re.compile(rf"(?:{re.escape(_AROUND[0])}\s*)?\[\s*[\w.]+\s*\(")
_FIRST = [r"\[", r"\s*", r"[\w.]+", r"\s*", r"\("]
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
            return Read(text)
        self._text.append(text)
        if not self._is_list:
            self._first += text if self._first else text.lstrip()
            self._is_list = _HEAD.match(self._first, 0, MAX_HEAD_CHARS) is not None
            may_be_list = len(self._first) < MAX_HEAD_CHARS and _HEAD_BEGUN.fullmatch(self._first)
            self._is_text = not self._is_list and not may_be_list
        return Read(self._taken()) if self._is_text else Read()

    def end(self, *, is_cut: bool = False) -> Read:
        text, read = self._taken(), Read()
        for name, arguments in _calls_in(text):
            read.begin(name, arguments)
        return read if read.pieces else Read(text)

    def _taken(self) -> str:
        text = "".join(self._text)
        self._text.clear()
        return text


def _calls_in(text: str) -> list[tuple[str, str]]:
    """Returns names and arguments; nothing if the text is anything else than calls."""
    if len(text) > _MAX_CHARS:
        return []
    for mark in _AROUND:
        text = text.replace(mark, "")
    try:
        found = ast.parse(text.strip(), mode="eval").body
        return [_call(each) for each in found.elts] if isinstance(found, ast.List) else []
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _call(node: ast.expr) -> tuple[str, str]:
    """Raises ValueError if it is no call with literals by name."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call")
    arguments = {}
    for each in node.keywords:
        if each.arg is None:
            raise ValueError("an argument without a name")
        arguments[each.arg] = ast.literal_eval(each.value)
    try:
        return ast.unparse(node.func), json.dumps(arguments, ensure_ascii=False)
    except TypeError as error:
        raise ValueError("a value that JSON has not") from error
