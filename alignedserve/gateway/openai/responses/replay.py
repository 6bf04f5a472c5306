"""The events of a response that is kept: the sequence that a stream would have had, with each text in one piece."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from alignedserve.gateway.http.json_pieces import Json, event_named

_DELTAS = {
    "output_text": "response.output_text",
    "reasoning_text": "response.reasoning_text",
}


def events_of(body: Json) -> Iterator[tuple[str, Json]]:
    """`body` is that of a response which is over."""
    early = body | {"status": "in_progress", "output": [], "usage": None, "completed_at": None}
    yield "response.created", {"response": early}
    yield "response.in_progress", {"response": early}
    for index, item in enumerate(body["output"]):
        place = {"item_id": item["id"], "output_index": index}
        nothing: Json = {"content": []} if "content" in item else {"arguments": ""}
        begun = item | {"status": "in_progress"} | nothing
        yield "response.output_item.added", {"output_index": index, "item": begun}
        if item["type"] == "function_call":
            arguments = item["arguments"]
            yield "response.function_call_arguments.delta", place | {"delta": arguments}
            yield (
                "response.function_call_arguments.done",
                place | {"name": item["name"], "arguments": arguments},
            )
        else:
            yield from _of_parts(item["content"], place)
        yield "response.output_item.done", {"output_index": index, "item": item}
    status = body["status"]
    yield f"response.{'failed' if status == 'cancelled' else status}", {"response": body}


def _of_parts(parts: list[Json], place: Json) -> Iterator[tuple[str, Json]]:
    for number, part in enumerate(parts):
        at, name = place | {"content_index": number}, _DELTAS[part["type"]]
        logprobs: Json = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        empty: dict[str, Any] = {"text": ""} | {key: [] for key in logprobs}
        yield "response.content_part.added", at | {"part": part | empty}
        yield f"{name}.delta", at | {"delta": part["text"]} | logprobs
        yield f"{name}.done", at | {"text": part["text"]} | logprobs
        yield "response.content_part.done", at | {"part": part}


def written(body: Json, after: int = -1) -> Iterator[bytes]:
    """Yields the events with higher numbers than `after`."""
    for number, (name, fields) in enumerate(events_of(body)):
        if number > after:
            yield event_named(name, {"type": name, "sequence_number": number, **fields})
