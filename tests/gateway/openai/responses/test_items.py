"""Items as clients send them, and the messages that the template gets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from alignedserve.gateway.generation.endpoint import ConversationNeeded
from alignedserve.gateway.limits.limits import CallLimits
from alignedserve.gateway.openai.responses.items import (
    MAX_ID_CHARS,
    Items,
    messages_of,
    new_id,
    new_stem,
    place_of,
)
from alignedserve.gateway.openai.responses.routes import RESPONSES
from alignedserve.types import InvalidRequest
from tests.gateway.scripted import MODEL

CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "mild"}
THOUGHTS = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
WRITTEN_CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
}


def read(given: Any) -> list[dict[str, Any]]:
    items = Items()
    items.add(given)
    return messages_of(items.all)


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        ("How far?", [{"role": "user", "content": "How far?"}]),
        (
            [
                {"role": "system", "content": "Be brief."},
                {
                    "type": "message",
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "How"},
                        {"type": "input_text", "text": "far?"},
                    ],
                },
            ],
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How\nfar?"}],
        ),
        (
            [
                {"role": "user", "content": "Where?"},
                THOUGHTS,
                {"role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
                CALL,
                CALL | {"call_id": "c2"},
                OUTPUT,
                OUTPUT | {"call_id": "c2", "output": [{"type": "input_text", "text": "wet"}]},
            ],
            [
                {"role": "user", "content": "Where?"},
                {
                    "role": "assistant",
                    "content": "Let me see.",
                    "reasoning_content": "Hm.",
                    "tool_calls": [WRITTEN_CALL, WRITTEN_CALL | {"id": "c2"}],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "mild"},
                {"role": "tool", "tool_call_id": "c2", "content": "wet"},
            ],
        ),
        (
            [{"role": "user", "content": "x"}, THOUGHTS, CALL],
            [
                {"role": "user", "content": "x"},
                {
                    "role": "assistant",
                    "content": None,
                    "reasoning_content": "Hm.",
                    "tool_calls": [WRITTEN_CALL],
                },
            ],
        ),
    ],
)
def test_items_are_a_chat(given: Any, messages: list[dict[str, Any]]) -> None:
    assert read(given) == messages


class Counted(str):
    """Counts the characters that are copied where such texts are added to others."""

    num_copied = 0

    def __add__(self, other: str) -> Counted:
        Counted.num_copied += len(self) + len(other)
        return Counted(str(self) + str(other))

    def __radd__(self, other: str) -> Counted:
        return Counted(other) + self


def test_thoughts_before_each_of_many_calls_are_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{Items.__module__}._thoughts", lambda item: Counted("x" * 100))
    (message,) = read([item for _ in range(500) for item in (THOUGHTS, CALL)])
    assert message["reasoning_content"] == "x" * 50_000 and len(message["tool_calls"]) == 500
    assert Counted.num_copied <= 2 * 50_000


def test_each_item_has_an_id_and_can_be_referred_to() -> None:
    ((name, text),) = Items().add("How far?")
    first = json.loads(text)
    assert name == first["id"] and name.startswith("msg_") and first["type"] == "message"
    items = Items([first])
    kept = items.add([{"type": "item_reference", "id": name}, CALL | {"id": "fc_1"}])
    assert items.all == [first, first, CALL | {"id": "fc_1"}]
    # what is kept is the reference, which adds what it refers to
    assert json.loads(kept[0][1]) == {"type": "item_reference", "id": name}
    assert items.num_added_bytes == len(text)
    assert Items().add([CALL | {"id": None}])[0][0].startswith("fc_")


def test_references_to_stored_items_are_looked_up_once() -> None:
    stem = new_stem()
    name, other = new_id("message", stem, 3), new_id("message", stem)
    assert (place_of(name), place_of(other), place_of("msg_1")) == ((stem, 3), (stem, None), None)
    references = [{"type": "item_reference", "id": each} for each in (name, name, other)]
    items = Items(references, referred=None)
    items.add(references)
    assert [*items.missing] == [name, other] and items.all == []
    # Only the input's own must be there: earlier turns go on without a target that is gone.
    target = {"type": "message", "id": name, "role": "user", "content": "x"}
    items = Items(references, [target])
    assert items.all == [target, target]
    with pytest.raises(InvalidRequest, match=f"there is no item '{other}'"):
        items.add(references)
    # The first of several adds nothing to what was read.
    assert Items(references[:1], [target]).num_added_bytes == 0
    assert Items(references[:2], [target]).num_added_bytes > 0
    asked = json.dumps({"input": references}).encode()
    with pytest.raises(
        ConversationNeeded, match="input: a reference to a stored item is not possible in a batch"
    ):
        RESPONSES.prepare(asked, MODEL, CallLimits())


def test_references_add_what_they_refer_to_without_copies() -> None:
    large = {"type": "reasoning", "id": "a", "junk": "x" * 1000}
    items = Items()
    kept = items.add([large, *[{"type": "item_reference", "id": "a"}] * 100])
    assert items.num_added_bytes > 100_000 and sum(len(text) for _, text in kept) < 10_000


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ([{"type": "item_reference", "id": "msg_1"}], "no item 'msg_1'"),
        ([{"role": "robot", "content": "x"}], "role='robot'"),
        ([{"role": "user"}], "must be a text"),
        (["x"], "must be a text"),
        ([CALL | {"arguments": {}}], "'function_call' is not complete"),
        ([{"type": "computer_call"}], "'computer_call' is not complete, or not supported"),
        ([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], "type 'input_image'"),
        ([{"role": "user", "content": [5]}], "list of parts"),
        ([THOUGHTS | {"id": ["a"]}], "id must be a text"),
        ([THOUGHTS | {"id": {}}], "id must be a text"),
        ([{"type": "item_reference", "id": 5}], "id must be a text"),
        ([THOUGHTS | {"id": "a" * (MAX_ID_CHARS + 1)}], "id must be a text"),
        ([THOUGHTS | {"junk": "\ud800"}], "half of a surrogate pair"),
        ([CALL | {"call_id": "\ud800"}], "half of a surrogate pair"),
    ],
)
def test_what_is_wrong_is_named(given: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        read(given)
