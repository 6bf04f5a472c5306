"""A valid call, ready to become requests."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from alignedserve.gateway.generation.response_builder import ResponseBuilder
from alignedserve.gateway.generation.service import Service, ServiceTier
from alignedserve.gateway.model import ServedModel
from alignedserve.sampling_params import SamplingParams

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


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A valid call, except for its grammar, which is compiled elsewhere. Each API adds what its answer shows."""

    # The token ids of each prompt, packed: lists of them take long to decode and to encode.
    prompts: list[bytes]
    params: SamplingParams
    # The name of the parameter that prescribes the form of the output.
    structure_name: str
    # How the request is to be served.
    is_stream: bool
    service_tier: ServiceTier | None
    ttft_ms: float | None
    tbt_ms: float | None
    cache_salt: str
    # False: the client wants what is known with the first token, but not that token.
    gives_output: bool = True
    # The parameters of the body that are unknown here, and were ignored.
    ignored: list[str] = []

    def response_builder(self, answering: Answering) -> ResponseBuilder:
        raise NotImplementedError


class Answered(msgspec.Struct, frozen=True):
    """The answer of an endpoint that needs no engine."""

    # JSON.
    body: bytes
    ignored: list[str] = []


def packed(ids: Sequence[int]) -> bytes:
    return array(_ID, ids).tobytes()


def ids_of(packed_ids: bytes) -> list[int]:
    ids = array(_ID)
    ids.frombytes(packed_ids)
    return ids.tolist()
