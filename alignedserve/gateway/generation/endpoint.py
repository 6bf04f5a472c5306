"""From the bytes of a body to a valid call: parsed, checked, put into the template, tokenised.

The work grows with what a client sends, so it is done by plain functions, which processes of their own call
(preparer.py). The result is bounded by the server's limits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from alignedserve.gateway.fields import check_number, take_unknown
from alignedserve.gateway.generation.prepared import Answered, PreparedCall
from alignedserve.gateway.http.errors import ApiError, invalid, misshapen
from alignedserve.gateway.limits import Limits
from alignedserve.gateway.model import ServedModel
from alignedserve.types import InvalidRequest

AnyBody = TypeVar("AnyBody", bound=BaseModel)

Result = PreparedCall | Answered


class Needed(msgspec.Struct, frozen=True):
    """The id that a call has in one of these parameters."""

    param: Literal["previous_response_id", "conversation"]
    id: str


class ConversationNeeded(ApiError):
    """A call goes on with an earlier response or a conversation, and came without its items."""

    def __init__(self, needed: Needed) -> None:
        super().__init__(400, f"{needed.param}: not possible in a batch", param=needed.param)
        self.needed = needed


class Expands(Exception):
    """With all that its body refers to, a call is larger than what this lane takes."""

    def __init__(self, num_bytes: int) -> None:
        """`num_bytes` is the size of what it refers to."""
        super().__init__(f"{num_bytes} bytes")
        self.num_bytes = num_bytes


@dataclass(frozen=True)
class Beside:
    """What a call consists of besides its body."""

    # The items of the conversation before it, a JSON array.
    earlier: bytes | None = None
    # The most bytes that what body and conversation refer to may have here.
    room: int | None = None


@dataclass(frozen=True)
class Endpoint:
    """A path that takes a body of its own shape."""

    path: str
    body: type[BaseModel]
    # Makes the call of a valid body, with the model and the limits. Raises ApiError and InvalidRequest.
    make: Callable[..., Result]
    # What `make` returns.
    made: type[PreparedCall] | type[Answered] = Answered
    # Whether the lines of a batch job may be its calls.
    in_batches: bool = False
    # Whether a call may go on with a conversation: `make` gets what is Beside the body, too.
    has_conversations: bool = False

    def prepare(
        self,
        data: bytes,
        model: ServedModel,
        limits: Limits,
        is_strict: bool = False,
        beside: Beside = Beside(),
    ) -> Result:
        """With `is_strict`, unknown parameters are refused. Raises ApiError, which can be ConversationNeeded, and
        Expands, and nothing else that a client could cause."""
        body = _validated(_parsed(data), self.body)
        more = (beside,) if self.has_conversations else ()
        try:
            unknown = unknown_in(body, is_strict)
            made = self.make(body, model, limits, *more)
            ignored = [*unknown, *made.ignored]
            # They are named in a header.
            check_number(ignored)
        except InvalidRequest as error:
            raise invalid(error) from error
        _check_ignored(made.ignored, is_strict)
        return msgspec.structs.replace(made, ignored=ignored) if unknown else made

    def prepare_encoded(
        self, data: bytes, model: ServedModel, limits: Limits, is_strict: bool, beside: Beside
    ) -> bytes:
        """Returns what `prepare` does, as it is sent to another process. Raises what that does."""
        made = self.prepare(data, model, limits, is_strict, beside)
        try:
            return msgspec.msgpack.encode(made)
        except UnicodeEncodeError:
            # Names that nothing else has had to encode: of tools, of their kinds and of their parameters.
            raise ApiError(400, "the body: a text in it has half of a surrogate pair") from None


# By path.
Endpoints = Mapping[str, Endpoint]


def unknown_in(body: BaseModel, is_strict: bool) -> list[str]:
    """Removes the unknown parameters from the body, and returns their names. Raises ApiError if it `is_strict` and
    there are any, and InvalidRequest for those that are always refused."""
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
        # The body is no UTF-8, has a number of thousands of digits, or is nested too deeply.
        raise ApiError(400, f"the body is not valid JSON: {error}") from None


def _validated(found: Any, body_type: type[AnyBody]) -> AnyBody:
    try:
        return body_type.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise misshapen(first, first["loc"]) from None
