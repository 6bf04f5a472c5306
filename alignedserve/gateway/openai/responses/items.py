"""The items of a conversation, as clients send them: messages, calls and their outputs, thoughts. As messages of a chat
they go into the template."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from alignedserve.types import InvalidRequest

Item = dict[str, Any]

_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_ROLES = ("user", "assistant", "system", "developer")
# An id begins with what it is of.
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def new_id(kind: str) -> str:
    return f"{_PREFIXES.get(kind, 'item')}_{secrets.token_hex(12)}"


def items_of(given: str | Sequence[Any], earlier: Sequence[Item]) -> list[Item]:
    """Returns the items that a client sends, each with its type and an id. References are to the `earlier` ones, or to
    those before. Raises InvalidRequest."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    known = {item["id"]: item for item in earlier if "id" in item}
    found = []
    for item in given:
        read = _item(item, known)
        known[read["id"]] = read
        found.append(read)
    return found


def messages_of(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Raises InvalidRequest for an item that a chat of texts can't have."""
    messages: list[dict[str, Any]] = []
    # Thoughts belong to the assistant's turn that they come before.
    thoughts = ""
    for item in items:
        match item["type"]:
            case "message":
                message = {"role": item["role"], "content": _text(item["content"], "input")}
                messages.append(message | _thought(thoughts if item["role"] == "assistant" else ""))
                thoughts = ""
            case "reasoning":
                thoughts += _thoughts(item)
            case "function_call":
                _add_call(messages, item, thoughts)
                thoughts = ""
            case _:
                output = _text(item["output"], "input")
                messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
    return messages


def _item(item: Any, known: Mapping[str, Item]) -> Item:
    match item:
        case {"type": "item_reference", "id": str(reference)}:
            if reference in known:
                return known[reference]
            raise InvalidRequest(f"input: there is no item {reference!r} to refer to")
        case {"type": "function_call", "call_id": str(), "name": str(), "arguments": str()}:
            pass
        case {"type": "function_call_output", "call_id": str(), "output": str() | list()}:
            pass
        case {"type": "reasoning"}:
            pass
        case {"role": str(role), "content": str() | list()} if item.get("type", "message") == "message":
            if role not in _ROLES:
                raise InvalidRequest(f"input: role={role!r}: must be one of {', '.join(_ROLES)}")
        case {"type": str(kind)}:
            raise InvalidRequest(f"input: an item of type {kind!r} is not complete, or not supported here")
        case _:
            raise InvalidRequest("input: must be a text, or a list of items")
    kind = item.get("type", "message")
    return {
        "id": new_id(kind),
        **{key: value for key, value in item.items() if value is not None},
        "type": kind,
    }


def _text(content: str | Sequence[Any], name: str) -> str:
    """Returns the text of a content or of its parts."""
    return content if isinstance(content, str) else "\n".join(_parts(content, name))


def _parts(content: Sequence[Any], name: str) -> Iterator[str]:
    for part in content:
        match part:
            case {"type": str(kind), "text": str(text)} if kind in _TEXTS:
                yield text
            case {"type": "refusal", "refusal": str(text)}:
                yield text
            case {"type": str(kind)}:
                raise InvalidRequest(
                    f"{name}: a part of type {kind!r} is not supported: the model reads text"
                )
            case _:
                raise InvalidRequest(f"{name}: a content must be a text, or a list of parts")


def _thoughts(item: Item) -> str:
    parts = item.get("content") or item.get("summary") or []
    return "\n".join(_parts(parts, "input")) if isinstance(parts, list) else ""


def _thought(thoughts: str) -> dict[str, str]:
    return {"reasoning_content": thoughts} if thoughts else {}


def _add_call(messages: list[dict[str, Any]], item: Item, thoughts: str) -> None:
    """Adds a call to the assistant's turn, which may have begun."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    messages[-1] |= _thought(messages[-1].get("reasoning_content", "") + thoughts)
    function = {"name": item["name"], "arguments": item["arguments"]}
    call = {"id": item["call_id"], "type": "function", "function": function}
    messages[-1].setdefault("tool_calls", []).append(call)
