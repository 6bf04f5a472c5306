"""Adapts a chat's turns to gpt-oss's template, which would omit or refuse some. Instructions become one message, the
first. Reasoning becomes `thinking`. Each turn makes one call."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

Message = Mapping[str, Any]


def turns_of(messages: Sequence[Message]) -> list[Message]:
    """Returns the turns for the template. It renders only the first call of a turn, and takes the tool message after it
    for its result. So each call becomes a turn of its own, followed by its results. Later instructions become user
    messages."""
    first = list(takewhile(_instructs, messages))
    rest = deque(messages[len(first) :])
    turns: list[Message] = first
    if len(first) > 1:
        turns = [{**first[0], "content": [part for message in first for part in _parts(message)]}]
    while rest:
        message = rest.popleft()
        if message.get("role") != "assistant":
            turns.append({**message, "role": "user"} if _instructs(message) else message)
            continue
        results = []
        while rest and rest[0].get("role") == "tool":
            results.append(rest.popleft())
        turns += _turns(message, results)
    return turns


def _instructs(message: Message) -> bool:
    return message.get("role") in ("system", "developer")


def _turns(message: Message, results: Sequence[Message]) -> Iterator[Message]:
    """Yields the turns that replace an assistant's turn, with the results that followed it."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        yield _thinking({key: value for key, value in message.items() if key != "tool_calls"})
        yield from results
        return
    by_call: dict[str, list[Message]] = {}
    others = []
    ids = {_id(call) for call in calls}
    for result in results:
        call_id = result.get("tool_call_id")
        if isinstance(call_id, str) and call_id in ids:
            by_call.setdefault(call_id, []).append(result)
        else:
            others.append(result)
    turn = _in_one(_thinking(message))
    for call in calls:
        yield {**turn, "tool_calls": [call]}
        yield from by_call.pop(_id(call), ())
        turn = {"role": "assistant"}
    yield from others


def _thinking(message: Message) -> Message:
    thoughts = message.get("thinking") or message.get("reasoning_content")
    return {**message, "thinking": thoughts} if thoughts else message


def _in_one(turn: Message) -> Message:
    """Joins reasoning and content of a turn with a call: the template takes either, and shows content there as
    reasoning."""
    thoughts = turn.get("thinking")
    if not thoughts or not turn.get("content"):
        return turn
    return {**turn, "thinking": None, "content": [_part(thoughts), *_parts(turn)]}


def _parts(message: Message) -> list[Any]:
    """Returns the message's content as a list. Its texts become lines."""
    content = message.get("content")
    return content if isinstance(content, list) else [_part(content)]


def _part(text: Any) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _id(call: Any) -> str:
    found = call.get("id") if isinstance(call, Mapping) else None
    return found if isinstance(found, str) else ""
