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

from alignedserve.gateway.generation.body import GenerationBody
from alignedserve.gateway.generation.call import Call, Spec, packed
from alignedserve.gateway.http.errors import ApiError, invalid, misshapen
from alignedserve.gateway.http.fields import check_number, take_unknown
from alignedserve.gateway.limits.limits import CallLimits
from alignedserve.gateway.model.served_model import ServedModel
from alignedserve.protocol.messages import Request
from alignedserve.sampling_params import SamplingParams
from alignedserve.types import InvalidRequest, RequestKey


class DirectAnswer(msgspec.Struct, frozen=True):
    """The answer of an endpoint that needs no engine."""

    # JSON. It may have megabytes, and is a view of the child process's answer.
    body: memoryview
    ignored: list[str] = []


# ---- checks of every call, before and after its prompts are tokenised ------------------------------------------------


def check_body(body: GenerationBody, model: ServedModel, limits: CallLimits) -> None:
    """Checks the model's name and the numbers of token ids, before tokenising. Raises ApiError and InvalidRequest."""
    model.check_name(body.model)
    limits.check_counts(
        stop_token_ids=body.stop_token_ids,
        logit_bias=body.logit_bias,
        allowed_token_ids=body.allowed_token_ids,
        bad_words=body.bad_words,
    )


def checked_prompts(
    body: GenerationBody,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    model: ServedModel,
    limits: CallLimits,
) -> SamplingParams:
    """Checks the prompts, and returns `params` with max_tokens reduced to what fits. Raises ApiError and
    InvalidRequest."""
    params = model.with_bad_word_ids(params)
    lengths = list(map(len, prompts))
    limits.check_prompts(lengths, params)
    for prompt in prompts:
        model.check(prompt, params)
    return limits.with_room_for_logprobs(lengths, params, body.num_kept_logprobs, model.max_model_len)


def call_of(
    body: GenerationBody,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    structure_name: str,
    model: ServedModel,
    spec: Spec,
) -> Call[Spec]:
    """Returns the call for tokens of these prompts."""
    return Call(
        request=Request(
            key=RequestKey(0),
            prompt=[],
            params=params,
            seed=0,
            arrival_s=0.0,
            cache_salt=body.cache_salt or "",
            reports_progress=body.reports_progress,
            adapter=model.adapter_of(body.model),
            awaits="user" if body.will_continue else "",
        ),
        prompts=[packed(prompt) for prompt in prompts],
        spec=spec,
        service_tier=body.service_tier,
        ttft_ms=body.slo.ttft_ms if body.slo else None,
        tbt_ms=body.slo.tbt_ms if body.slo else None,
        structure_name=structure_name,
        is_stream=bool(body.stream),
    )


# ---- from a body to a call -------------------------------------------------------------------------------------------


AnyBody = TypeVar("AnyBody", bound=BaseModel)

Result = Call[Any] | DirectAnswer


class Needed(msgspec.Struct, frozen=True):
    """What a call continues or refers to: the parameter that names it, and the id of a response or conversation, or for
    `input` the ids of items."""

    param: Literal["previous_response_id", "conversation", "input"]
    id: str = ""
    item_ids: Sequence[str] = ()


class ConversationNeeded(ApiError):
    """A call continues an earlier response or a conversation, or refers to stored items, which were not passed."""

    def __init__(self, needed: Needed) -> None:
        what = "a reference to a stored item is " if needed.param == "input" else ""
        super().__init__(400, f"{needed.param}: {what}not possible in a batch", param=needed.param)
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

    # What the call continues and refers to, in JSON: see EarlierConversation.
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
    made: type[Call[Any]] | type[DirectAnswer] = DirectAnswer
    # Whether a batch job may have calls of this endpoint as its lines.
    in_batches: bool = False
    # Whether a call may continue a conversation. `make` then takes a Beside, too.
    has_conversations: bool = False

    def prepare(
        self,
        data: bytes,
        model: ServedModel,
        limits: CallLimits,
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
        self, data: bytes, model: ServedModel, limits: CallLimits, is_strict: bool, beside: Beside
    ) -> bytes:
        """Returns the result of `prepare`, encoded for another process. Raises the same."""
        made = self.prepare(data, model, limits, is_strict, beside)
        try:
            return msgspec.msgpack.encode(made)
        except UnicodeEncodeError:
            # In a name that nothing has encoded before, such as that of a tool, its type or its parameter.
            raise ApiError(400, "the body contains half of a surrogate pair") from None


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
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: it is not UTF-8, at byte {error.start}") from None
    except RecursionError:
        raise ApiError(400, "the body is not valid JSON: it is nested too deeply") from None
    except ValueError:
        raise ApiError(400, "the body is not valid JSON: a number has too many digits") from None


def _validated(found: Any, body_type: type[AnyBody]) -> AnyBody:
    try:
        return body_type.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise misshapen(first, first["loc"]) from None
