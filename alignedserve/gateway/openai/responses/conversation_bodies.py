"""The bodies of conversations, and the parts of them that are stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from pydantic import Field

from alignedserve.gateway.generation.endpoint import DirectAnswer, Endpoint
from alignedserve.gateway.http.fields import BodyFields
from alignedserve.gateway.http.reading import too_large
from alignedserve.gateway.limits.limits import CallLimits
from alignedserve.gateway.model.served_model import ServedModel
from alignedserve.gateway.openai.responses.body import Metadata
from alignedserve.gateway.openai.responses.items import Items, index_of, kept_json, messages_of, new_stem
from alignedserve.types import InvalidRequest

# OpenAI's limit per call.
MAX_NEW_ITEMS = 20
NewItems = Annotated[list[Any], Field(max_length=MAX_NEW_ITEMS)]


class ConversationBody(BodyFields):
    items: NewItems | None = None
    metadata: Metadata | None = None


class ConversationUpdate(BodyFields):
    metadata: Metadata | None


class ConversationAddition(BodyFields):
    items: NewItems


class Given(DirectAnswer, frozen=True):
    """The parts of a body that are stored."""

    # The stem of the items' ids.
    stem: str = ""
    # JSON with commas between the items; and a line per item: its end in that JSON, and its id as JSON.
    items: bytes = b""
    index: bytes = b""
    metadata: bytes = b"{}"

    def with_stem(self, stem: str) -> Given:
        """Returns the parts with this stem, which is as long, in the items' ids."""
        old, new = self.stem.encode(), stem.encode()
        items, index = self.items.replace(old, new), self.index.replace(old, new)
        return msgspec.structs.replace(self, stem=stem, items=items, index=index)


def given(body: Any, model: ServedModel, limits: CallLimits) -> Given:
    """Returns the parts of a body that are stored. Raises ApiError and InvalidRequest."""
    stem = new_stem()
    items, index = _kept(getattr(body, "items", None) or [], stem, limits)
    metadata = kept_json("metadata", getattr(body, "metadata", None) or {})
    return Given(memoryview(b""), [], stem, items, index, metadata)


def _kept(found: Sequence[Any], stem: str, limits: CallLimits) -> tuple[bytes, bytes]:
    items = Items(stem=stem)
    try:
        kept = items.add(found, in_full=True)
        # Raises InvalidRequest for items that no response could continue.
        messages_of(items.all)
    except InvalidRequest as error:
        message = str(error).removeprefix("input").replace("a text, or a list", "a list")
        raise InvalidRequest(f"items{message}") from None
    written = b",".join(item for _, item in kept)
    if len(written) > limits.max_body_bytes:
        # A number of three characters may become one of twenty.
        raise too_large(limits.max_body_bytes, "as it would be stored, ")
    return written, index_of([(name, len(item)) for name, item in kept])


_ONE = "/v1/conversations/{conversation_id}"
CREATE: Final = Endpoint("/v1/conversations", ConversationBody, given, Given)
UPDATE: Final = Endpoint(_ONE, ConversationUpdate, given, Given)
ADD_ITEMS: Final = Endpoint(f"{_ONE}/items", ConversationAddition, given, Given)
