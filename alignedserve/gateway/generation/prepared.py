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
from alignedserve.gateway.model import ServedModel
from alignedserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from alignedserve.gateway.generation.request_builder import RequestBuilder

# The type of token ids in `Prepared.prompts`: four bytes each.
_ID: Final = "i"
TOKEN_BYTES: Final = 4


@dataclass(frozen=True)
class Answering:
    """What a response builder needs to know besides the call."""

    model: ServedModel
    service: Service
    prompts: Sequence[list[int]]
    # Seconds since 1970.
    created: int


class PreparedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A valid call, whatever it asks for."""

    # The token ids of each prompt, packed: lists of them take long to decode and to encode.
    prompts: list[bytes]
    # How the request is to be served.
    service_tier: ServiceTier | None
    ttft_ms: float | None
    cache_salt: str
    # The parameters of the body that were ignored: they are unknown here, or this model can make nothing of them.
    ignored: list[str] = []
    # See messages.Request.
    adapter: str = ""

    async def whole(
        self, request_builder: RequestBuilder, service: Service, owner: str
    ) -> tuple[Iterable[Piece], Mapping[str, Any]]:
        """Runs the call from start to end. Returns its answer as JSON, and the usage in it. `owner` is that of the
        request's key (http/keys.py). Raises ApiError and InvalidRequest."""
        raise NotImplementedError


class Prepared(PreparedCall, frozen=True, kw_only=True):
    """A valid call for tokens, except for its grammar, which is compiled elsewhere. Each API adds what its answer
    shows."""

    params: SamplingParams
    # The name of the parameter that prescribes the form of the output.
    structure_name: str
    is_stream: bool
    tbt_ms: float | None
    # False: the client wants what is known with the first token, but not that token.
    gives_output: bool = True
    # Whether the stream says how far the prompt is.
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

    # JSON. It may have megabytes, and is part of what the process for bodies answered.
    body: memoryview
    ignored: list[str] = []


def packed(ids: Sequence[int]) -> bytes:
    return array(_ID, ids).tobytes()


def ids_of(packed_ids: bytes) -> list[int]:
    ids = array(_ID)
    ids.frombytes(packed_ids)
    return ids.tolist()
