"""Parses calls that are written as Python: `[weather(city="Rome"), clock()]`, as Llama 4 and some of Llama 3.2 do."""

from __future__ import annotations

import ast
import json

from alignedserve.gateway.tools.calls import Read
from alignedserve.gateway.tools.readers import Reader

# Parsing a longer text could take long.
_MAX_CHARS = 1 << 16
_NAMES = {"true": True, "false": False, "null": None}
_AROUND = ("<|python_start|>", "<|python_end|>")


class PythonicReader(Reader):
    """The whole of the text is a list of calls, or it is text."""

    def __init__(self) -> None:
        self._text = ""
        self._is_text = False

    def feed(self, text: str) -> Read:
        if self._is_text:
            return Read(text)
        self._text += text
        begun = self._text.lstrip()
        self._is_text = (
            bool(begun) and not begun.startswith("[") and not _AROUND[0].startswith(begun[: len(_AROUND[0])])
        )
        if not self._is_text:
            return Read()
        text, self._text = self._text, ""
        return Read(text)

    def end(self) -> Read:
        text, self._text = self._text, ""
        read = Read()
        for name, arguments in _calls_in(text):
            read.begin(name, arguments)
        return read if read.pieces else Read(text)


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


class _AsPython(ast.NodeTransformer):
    """JSON's names for what Python calls True, False and None, and its halves of characters."""

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
