"""Turns the bytes of a body into a valid call: parses, checks, renders the template, tokenises.

This work grows with what a client sends. So these are plain functions that run in child processes (preparer.py). The
result is bounded by the server's limits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from alignedserve.gateway.generation.prepared import DirectAnswer, PreparedCall
from alignedserve.gateway.http.errors import ApiError, invalid, misshapen
from alignedserve.gateway.http.fields import check_number, take_unknown
from alignedserve.gateway.limits.limits import Limits
from alignedserve.gateway.model.served_model import ServedModel
from alignedserve.types import InvalidRequest

AnyBody = TypeVar("AnyBody", bound=BaseModel)

Result = PreparedCall | DirectAnswer


class Needed(msgspec.Struct, frozen=True):
    """The response or conversation that a call continues: the parameter that names it, and its id."""

    param: Literal["previous_response_id", "conversation"]
    id: str


class ConversationNeeded(ApiError):
    """A call continues an earlier response or a conversation, and its items were not passed."""

    def __init__(self, needed: Needed) -> None:
        super().__init__(400, f"{needed.param}: not possible in a batch", param=needed.param)
        self.needed = needed


class Expands(Exception):
    """With all that its body refers to, a call is larger than this lane takes."""

    def __init__(self, num_bytes: int) -> None:
        """`num_bytes` is the size of what the body refers to."""
        super().__init__(f"{num_bytes} bytes")
        self.num_bytes = num_bytes


@dataclass(frozen=True)
class Beside:
    """Inputs of a call besides its body."""

    # The items of the conversation before the call, as a JSON array.
    earlier: bytes | None = None
    # Bytes that the objects to which body and conversation refer may have in this lane, at most. None: no limit.
    room: int | None = None


@dataclass(frozen=True)
class Endpoint:
    """A path with a request body of its own shape."""

    path: str
    body: type[BaseModel]
    # Makes the call of a valid body, with the model and the limits. Raises ApiError and InvalidRequest.
    make: Callable[..., Result]
    # The type that `make` returns.
    made: type[PreparedCall] | type[DirectAnswer] = DirectAnswer
    # Whether a batch job may have calls of this endpoint as its lines.
    in_batches: bool = False
    # Whether a call may continue a conversation. `make` then takes a Beside, too.
    has_conversations: bool = False

    def prepare(
        self,
        data: bytes,
        model: ServedModel,
        limits: Limits,
        is_strict: bool = False,
        beside: Beside = Beside(),
    ) -> Result:
        """Returns the valid call. With `is_strict`, unknown parameters are refused. No body causes other exceptions
        than ApiError, which may be ConversationNeeded, and Expands."""
        body = _validated(_parsed(data), self.body)
        more = (beside,) if self.has_conversations else ()
        try:
            unknown = unknown_in(body, is_strict)
            made = self.make(body, model, limits, *more)
            ignored = [*unknown, *made.ignored]
            # The ignored parameters are named in a response header.
            check_number(ignored)
        except InvalidRequest as error:
            raise invalid(error) from error
        _check_ignored(made.ignored, is_strict)
        return msgspec.structs.replace(made, ignored=ignored) if unknown else made

    def prepare_encoded(
        self, data: bytes, model: ServedModel, limits: Limits, is_strict: bool, beside: Beside
    ) -> bytes:
        """Returns the result of `prepare`, encoded for another process. Raises the same."""
        made = self.prepare(data, model, limits, is_strict, beside)
        try:
            return msgspec.msgpack.encode(made)
        except UnicodeEncodeError:
            # In a name that nothing has encoded before, such as that of a tool, its type or its parameter.
            raise ApiError(400, "the body: a text in it has half of a surrogate pair") from None


# By path.
Endpoints = Mapping[str, Endpoint]


def unknown_in(body: BaseModel, is_strict: bool) -> list[str]:
    """Removes the unknown parameters from the body and returns their names. Raises ApiError if there are any and it
    `is_strict`, and InvalidRequest for those that are always refused."""
    ignored = take_unknown(body)
    _check_ignored(ignored, is_strict)
    return ignored


def _check_ignored(ignored: Sequence[str], is_strict: bool) -> None:
    if ignored and is_strict:
        raise misshapen({"type": "extra_forbidden"}, ignored[0].split("."))


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error.msg}, at character {error.pos}") from None
    except (ValueError, RecursionError) as error:
        # The body is not UTF-8, has a number with thousands of digits, or is nested too deeply.
        raise ApiError(400, f"the body is not valid JSON: {error}") from None


def _validated(found: Any, body_type: type[AnyBody]) -> AnyBody:
    try:
        return body_type.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise misshapen(first, first["loc"]) from None
