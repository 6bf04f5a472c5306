"""A valid call, ready to become requests."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from alignedserve.gateway.generation.response_builder import ResponseBuilder
from alignedserve.gateway.generation.service import Service, ServiceTier
from alignedserve.gateway.http.json_pieces import Piece
from alignedserve.gateway.model.served_model import ServedModel
from alignedserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from alignedserve.gateway.generation.request_builder import RequestBuilder

# The type of token ids in `Prepared.prompts`: four bytes each.
_ID: Final = "i"
TOKEN_BYTES: Final = 4


@dataclass(frozen=True)
class Answering:
    """What a response builder needs besides the call."""

    model: ServedModel
    service: Service
    prompts: Sequence[list[int]]
    # Seconds since 1970.
    created: int


class PreparedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A valid call of any kind."""

    # The token ids of each prompt, packed: lists take long to encode and decode.
    prompts: list[bytes]
    # The service that the call asks for.
    service_tier: ServiceTier | None
    ttft_ms: float | None
    cache_salt: str
    # Parameters of the body that were ignored: unknown ones, and those without effect on this model.
    ignored: list[str] = []
    # See messages.Request.
    adapter: str = ""

    async def whole(
        self, request_builder: RequestBuilder, service: Service, owner: str
    ) -> tuple[Iterable[Piece], Mapping[str, Any]]:
        """Runs the call to its end. Returns its answer as JSON, and the usage. `owner` is the owner of its API key
        (http/keys.py). Raises ApiError and InvalidRequest."""
        raise NotImplementedError


class Prepared(PreparedCall, frozen=True, kw_only=True):
    """A valid call for tokens. Its grammar is not compiled yet: another process does that. Each API adds what its
    answer shows."""

    params: SamplingParams
    # The name of the parameter that determines the form of the output.
    structure_name: str
    is_stream: bool
    tbt_ms: float | None
    # False: the client asks for data that comes with the first token, and not for the token itself.
    gives_output: bool = True
    # Whether the stream reports the progress of the prompt.
    reports_progress: bool = False

    async def whole(
        self, request_builder: RequestBuilder, service: Service, owner: str
    ) -> tuple[Iterable[Piece], Mapping[str, Any]]:
        generation, builder = await request_builder.build(self, service, owner)
        try:
            await generation.collect(builder.add)
        finally:
            generation.close()
        return builder.whole(generation.usage), generation.usage.body

    def response_builder(self, answering: Answering) -> ResponseBuilder:
        raise NotImplementedError


class Answered(msgspec.Struct, frozen=True):
    """The answer of an endpoint that needs no engine."""

    # JSON. It may have megabytes, and is a view of the child process's answer.
    body: memoryview
    ignored: list[str] = []


def packed(ids: Sequence[int]) -> bytes:
    return array(_ID, ids).tobytes()


def ids_of(packed_ids: bytes) -> list[int]:
    ids = array(_ID)
    ids.frombytes(packed_ids)
    return ids.tolist()
