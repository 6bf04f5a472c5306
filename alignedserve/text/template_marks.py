"""Marks the control tokens that a chat template itself writes.

Most templates contain them as literals. These are marked in the template, and no operation on a client's text (strip,
cut, replace, escape) can produce a mark. Some templates compose them: `'<|' + message.role + '|>'`. Rendering a few
harmless chats shows which tokens are composed. If a client's strings contain the beginning of one, a character that
occurs in none of them is inserted while the template runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

# The arguments of these are searched for in a client's text, not written, so they stay unmarked. For `replace` this
# applies to the first one only.
_LOOKING = frozenset(
    (
        *("split", "rsplit", "partition", "rpartition", "startswith", "endswith", "find", "rfind", "index"),
        *("rindex", "count", "strip", "lstrip", "rstrip", "removeprefix", "removesuffix"),
        *("select", "reject", "selectattr", "rejectattr"),
    )
)
# Characters that JSON and Python's repr do not escape, and that few texts contain.
_SEPARATORS = range(0x3400, 0xA000)

# Roles that templates know. Not every template knows all of them.
_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "observation", "ipython")
_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}


class Marker(NodeTransformer):
    """Marks the literals in a template's syntax tree."""

    def __init__(self, mark: Callable[[str], str]) -> None:
        self._mark = mark

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.TemplateData(self._mark(node.data), lineno=node.lineno)

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        value = self._mark(node.value) if isinstance(node.value, str) else node.value
        return nodes.Const(value, lineno=node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        name = node.node.attr if isinstance(node.node, nodes.Getattr) else ""
        return self._called(node, name)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        return self._called(node, node.name)

    def _called(self, node: nodes.Call | nodes.Filter, name: str) -> nodes.Node:
        args = node.args
        num_read = len(args) if name in _LOOKING else 1 if name == "replace" else 0
        kept, node.args = args[:num_read], args[num_read:]
        self.generic_visit(node)
        node.args = [*kept, *node.args]
        return node


def harmless_chats() -> Iterator[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Yields messages and variables."""
    user, assistant = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
    called = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    for role in _ROLES:
        yield [{"role": role, "content": "z"}, user, assistant, user], {"tools": None}
        yield (
            [user, called, {"role": role, "content": "z", "name": "f", "tool_call_id": "c"}],
            {"tools": [_TOOL]},
        )


class Breaking:
    """Inserts a character into every beginning of one of `tokens`, and removes it again."""

    def __init__(self, tokens: frozenset[str], values: Any) -> None:
        """Raises ValueError if `values` contain every usable character."""
        beginnings = sorted({token[:2] for token in tokens if len(token) > 1})
        self._beginning = re.compile("|".join(map(re.escape, beginnings)) or "(?!)")
        is_needed = any(self._beginning.search(text) for text in _strings(values))
        self._separator = _free_character(values) if is_needed else ""

    def broken(self, value: Any) -> Any:
        if not self._separator:
            return value
        if isinstance(value, str):
            return self._beginning.sub(lambda found: found[0][0] + self._separator + found[0][1:], value)
        if isinstance(value, Mapping):
            return {self.broken(key): self.broken(each) for key, each in value.items()}
        if isinstance(value, Sequence):
            return [self.broken(each) for each in value]
        return value

    def whole(self, text: str) -> str:
        if not self._separator:
            return text
        # A template may have escaped it.
        return text.replace(self._separator, "").replace(f"\\u{ord(self._separator):04x}", "")


def _strings(value: Any) -> Iterator[str]:
    """Yields the strings in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _strings(key)
            yield from _strings(each)
    elif isinstance(value, Sequence):
        for each in value:
            yield from _strings(each)


def _free_character(values: Any) -> str:
    """Returns a character that occurs in no text, not even as an escape."""
    taken: set[str] = set()
    for text in _strings(values):
        taken.update(text)
        taken.update(chr(int(code, 16)) for code in re.findall(r"\\u([0-9a-fA-F]{4})", text))
    free = next((chr(code) for code in _SEPARATORS if chr(code) not in taken), None)
    if free is None:
        raise ValueError("too many different characters")
    return free
