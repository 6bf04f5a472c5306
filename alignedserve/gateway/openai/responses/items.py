"""The items of a conversation as clients send them: messages, calls and their outputs, reasoning; and their conversion
to chat messages for the template."""

from __future__ import annotations

import base64
import re
import secrets
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from typing import Any

from alignedserve.gateway.http.json_pieces import encode
from alignedserve.types import InvalidRequest

Item = dict[str, Any]

# Items of a conversation, at most, including earlier turns.
MAX_ITEMS = 4096
# Longest id of an item, in characters. OpenAI's have up to 64.
MAX_ID_CHARS = 256
_REFERENCE = "item_reference"

_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_ID_IN_PATH = re.compile(r"(?!\.{1,2}\Z)[^/?#%\x00-\x1f\x7f]+")
_ROLES = ("user", "assistant", "system", "developer")
# Prefixes of ids, by the item's type.
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
    "compaction": "cmp",
}


# An item's id names what the item belongs to, so that the id alone finds it (references.py): after the prefix, the stem
# of the response's or conversation's id; then an output item's number, or the random digits of another item.
_STEM_BYTES = 24
_NUM_RANDOM_BYTES = 6
_STEM = re.compile(rf"[0-9a-f]{{{2 * _STEM_BYTES}}}")
_ID = re.compile(rf"[a-z]+_({_STEM.pattern})([0-9a-f]{{4,{2 * _NUM_RANDOM_BYTES}}})")


def new_stem() -> str:
    return secrets.token_hex(_STEM_BYTES)


def stem_in(name: str) -> str | None:
    """Returns the stem in the id of a response or conversation. None: this server has made no such id."""
    stem = name.partition("_")[2]
    return stem if _STEM.fullmatch(stem) else None


def new_id(kind: str, stem: str | None = None, number: int | None = None) -> str:
    """Returns the id of an item that belongs to the response or conversation with this stem, or to none. `number` is
    its place in a response's output."""
    place = secrets.token_hex(_NUM_RANDOM_BYTES) if number is None else f"{number:04x}"
    return f"{_PREFIXES.get(kind, 'item')}_{stem or new_stem()}{place}"


def place_of(name: str) -> tuple[str, int | None] | None:
    """Returns the stem in an item's id, and its number if it is an output item. None: this server has made no such
    id."""
    found = _ID.fullmatch(name)
    if found is None:
        return None
    return found[1], None if len(found[2]) == 2 * _NUM_RANDOM_BYTES else int(found[2], 16)


class Items:
    """The items of a conversation. References are stored as references, because their targets may be large and there
    may be thousands of them."""

    def __init__(
        self, earlier: Sequence[Item] = (), referred: Sequence[Item] | None = (), stem: str | None = None
    ) -> None:
        """`earlier` are the stored items of earlier turns. `referred` are stored items of other responses and
        conversations. None: these have not been looked up. New ids have the `stem`."""
        # All items, with references replaced by their targets.
        self.all: list[Item] = []
        # Bytes that references add.
        self.num_added_bytes = 0
        # Ids in references that have to be looked up.
        self.missing: dict[str, None] = {}
        self._looks_up = referred is None
        self._stem = stem or new_stem()
        self._known: dict[str, Item] = {}
        # Items that are known once a reference names them.
        self._referred = {item["id"]: item for item in referred or () if item["type"] != _REFERENCE}
        self._sizes: dict[str, int] = {}
        for item in earlier:
            # The target of a reference may have been deleted since.
            if not self._is_unknown(item) or self._is_missing(item):
                self._add(item)

    def add(self, given: str | Sequence[Any], in_full: bool = False) -> list[tuple[str, bytes]]:
        """Adds items that a client sends. Returns the id of each and its stored form in JSON: unchanged, or `in_full`
        as a conversation lists it. Raises InvalidRequest."""
        if isinstance(given, str):
            given = [{"role": "user", "content": given}]
        kept = []
        for item in given:
            read = _item(item, self._stem)
            if in_full:
                read = completed(read)
            self._add(read)
            kept.append((read["id"], kept_json("input", read)))
            if len(self.all) + len(self.missing) > MAX_ITEMS:
                raise InvalidRequest(f"input: more than {MAX_ITEMS} items, with those of earlier responses")
        return kept

    def _add(self, item: Item) -> None:
        """Adds an item. A reference is to an earlier item, or to one of another response or conversation. Raises
        InvalidRequest."""
        name = item["id"]
        if self._is_missing(item):
            self.missing[name] = None
            return
        if item["type"] != _REFERENCE:
            self._known[name] = item
            self._sizes.pop(name, None)
        elif (found := self._referred.pop(name, None)) is not None:
            # Its size was counted when it was read.
            self._known[name] = found
        elif name not in self._known:
            raise InvalidRequest(f"input: there is no item {name!r} to refer to")
        else:
            if name not in self._sizes:
                self._sizes[name] = len(kept_json("input", self._known[name]))
            self.num_added_bytes += self._sizes[name]
        self.all.append(self._known[name])

    def _is_unknown(self, item: Item) -> bool:
        name = item["id"]
        return item["type"] == _REFERENCE and name not in self._known and name not in self._referred

    def _is_missing(self, item: Item) -> bool:
        """Returns whether it is a reference that has to be looked up."""
        return self._looks_up and self._is_unknown(item) and place_of(item["id"]) is not None


def kept_json(name: str, value: Any) -> bytes:
    """Returns the JSON in which the value of the parameter `name` is stored. Raises InvalidRequest."""
    try:
        return encode(value)
    except UnicodeEncodeError:
        raise InvalidRequest(f"{name}: it contains half of a surrogate pair") from None
    except RecursionError:
        raise InvalidRequest(f"{name}: it is nested too deeply") from None


def index_of(kept: Sequence[tuple[str, int]]) -> bytes:
    """Returns the index of items that are written with commas between them: a line per item with its end and its id as
    JSON. `kept` has the id and the size of each."""
    ends = accumulate((size + 1 for _, size in kept), initial=-1)
    lines = (
        b"%d %b\n" % (end, encode(name)) for (name, _), end in zip(kept, islice(ends, 1, None), strict=True)
    )
    return b"".join(lines)


def messages_of(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Returns the chat's messages. Raises InvalidRequest for an item that a text chat can't have."""
    messages: list[dict[str, Any]] = []
    # Reasoning of the assistant's turns, by the turn's place. It is joined once, since a turn may have thousands of
    # pieces.
    turns: dict[int, list[str]] = {}
    # Reasoning belongs to the assistant's turn after it.
    thoughts: list[str] = []
    for item in items:
        match item["type"]:
            case "message":
                messages.append({"role": item["role"], "content": _text(item["content"], "input")})
                if item["role"] == "assistant":
                    turns[len(messages) - 1] = thoughts
                thoughts = []
            case "reasoning":
                thoughts.append(_thoughts(item))
            case "function_call":
                _add_call(messages, item)
                turns.setdefault(len(messages) - 1, []).extend(thoughts)
                thoughts = []
            case "compaction":
                _add_summary(messages, item)
                thoughts = []
            case _:
                output = _text(item["output"], "input")
                messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
    for place, parts in turns.items():
        if joined := "".join(parts):
            messages[place]["reasoning_content"] = joined
    return messages


def _item(item: Any, stem: str) -> Item:
    """Returns the item with its type and an id. Raises InvalidRequest."""
    if isinstance(item, dict):
        _check_id(item.get("id"))
    match item:
        case {"type": "item_reference", "id": str(reference)}:
            return {"id": reference, "type": _REFERENCE}
        case {"type": "function_call", "call_id": str(), "name": str(), "arguments": str()}:
            pass
        case {"type": "function_call_output", "call_id": str(), "output": str() | list()}:
            pass
        case {"type": "reasoning"}:
            pass
        case {"type": "compaction", "encrypted_content": str(content)}:
            _summary(content)
        case {"role": str(role), "content": str() | list()} if item.get("type", "message") == "message":
            if role not in _ROLES:
                raise InvalidRequest(f"input: role={role!r}: must be one of {', '.join(_ROLES)}")
        case {"type": str(kind)}:
            raise InvalidRequest(f"input: an item of type {kind!r} is not complete, or not supported here")
        case _:
            raise InvalidRequest("input: must be a text, or a list of items")
    kind = item.get("type", "message")
    return {
        "id": new_id(kind, stem),
        **{key: value for key, value in item.items() if value is not None},
        "type": kind,
    }


def completed(item: Item) -> Item:
    """Returns the item with all fields that OpenAI's types require. Raises InvalidRequest."""
    if not _ID_IN_PATH.fullmatch(item["id"]):
        raise InvalidRequest(
            "input: an item's id is a part of a path: it must not be empty, '.' or '..', nor contain / ? # % or control"
            " characters"
        )
    match item["type"]:
        case "message":
            content = item["content"]
            if isinstance(content, str):
                is_output = item["role"] == "assistant"
                part = {"type": "output_text", "annotations": []} if is_output else {"type": "input_text"}
                content = [part | {"text": content}]
            return {"status": "completed", **item, "content": content}
        case "reasoning":
            return {"summary": [], **item}
        case "function_call" | "function_call_output":
            return {"status": "completed", **item}
    return item


def _check_id(given: Any) -> None:
    if given is not None and not (isinstance(given, str) and len(given) <= MAX_ID_CHARS):
        raise InvalidRequest(f"input: an item's id must be a text of at most {MAX_ID_CHARS} characters")


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
                    f"{name}: a part of type {kind!r} is not supported: the model takes text only"
                )
            case _:
                raise InvalidRequest(f"{name}: a content must be a text, or a list of parts")


def _thoughts(item: Item) -> str:
    parts = item.get("content") or item.get("summary") or []
    return "\n".join(_parts(parts, "input")) if isinstance(parts, list) else ""


def _add_summary(messages: list[dict[str, Any]], item: Item) -> None:
    """Adds the summary of the turns before it, as the answer to the user's messages among them. These become one
    message, since some templates take no two in a row."""
    asked: list[str] = []
    while messages and messages[-1]["role"] == "user":
        asked.append(messages.pop()["content"])
    if asked:
        messages.append({"role": "user", "content": "\n\n".join(reversed(asked))})
    text = f"Summary of the conversation so far:\n{_summary(item['encrypted_content'])}"
    messages.append({"role": "assistant", "content": text})


def _summary(content: str) -> str:
    """Returns the summary in a compaction item (compaction.py). Raises InvalidRequest."""
    try:
        return base64.b64decode(content, validate=True).decode()
    except ValueError:
        raise InvalidRequest("input: a compaction item that this server did not write") from None


def _add_call(messages: list[dict[str, Any]], item: Item) -> None:
    """Adds a call to the assistant's turn, which may have begun already."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    function = {"name": item["name"], "arguments": item["arguments"]}
    call = {"id": item["call_id"], "type": "function", "function": function}
    messages[-1].setdefault("tool_calls", []).append(call)
