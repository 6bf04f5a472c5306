"""Turns a prepared call, from a client or a line of a batch job, into a generation and its response builder."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from random import Random

from alignedserve.gateway.config import SloConfig
from alignedserve.gateway.generation.generation import Generation
from alignedserve.gateway.generation.prepared import Answering, Prepared, ids_of
from alignedserve.gateway.generation.preparer import Preparer
from alignedserve.gateway.generation.response_builder import ResponseBuilder
from alignedserve.gateway.generation.service import Service
from alignedserve.gateway.grammars.compiler import Compiler
from alignedserve.gateway.grammars.structure import check_structure
from alignedserve.gateway.islands.islands import Islands
from alignedserve.gateway.limits.limits import Limits
from alignedserve.gateway.model.lengths import Lengths
from alignedserve.gateway.model.served_model import ServedModel
from alignedserve.gateway.telemetry.ignored_parameters import IgnoredParameters
from alignedserve.lengths.config import NONE, LengthConfig
from alignedserve.protocol.pooling import POOLINGS

# token ids that are unpacked at a time, which takes a millisecond
_STEP_IDS = 1 << 15


@dataclass(frozen=True)
class RequestBuilder:
    """Builds generations, which are not started, and their response builders. Raises ApiError and InvalidRequest."""

    model: ServedModel
    islands: Islands
    compiler: Compiler
    preparer: Preparer
    limits: Limits = field(default_factory=Limits)
    slo: SloConfig = field(default_factory=SloConfig)
    lengths: Lengths = field(default_factory=lambda: Lengths(LengthConfig(NONE)))
    # Gives a seed to requests that have none.
    seeds: Random = field(default_factory=Random)
    ignored_parameters: IgnoredParameters = field(default_factory=IgnoredParameters)
    # How embeddings are made: one of POOLINGS.
    embedding_pooling: str = POOLINGS[0]

    async def build(self, call: Prepared, service: Service, owner: str) -> tuple[Generation, ResponseBuilder]:
        """`owner` is the owner of the call's API key (http/keys.py)."""
        await check_structure(self.compiler, self.limits, call.params, call.structure_name, owner)
        prompts = [await unpacked(packed) for packed in call.prompts]
        predictions = await self.lengths.predict(prompts, call.params, service.tier)
        model = self.model.answering_as(call.adapter)
        generation = Generation(
            self.islands,
            model,
            prompts,
            call.params,
            service,
            call.structure_name,
            call.gives_output,
            # In a stream, another choice may begin before the first one.
            asks_prompt_logprobs_once=not call.is_stream,
            predictions=predictions,
            seeds=self.seeds,
            cache_salt=salt_of(owner, call.cache_salt),
            reports_progress=call.reports_progress,
            adapter=call.adapter,
        )
        answering = Answering(model, service, prompts, int(time.time()))
        return generation, call.response_builder(answering)


def salt_of(owner: str, asked: str) -> str:
    """Returns the salt of a call's requests. Owners do not share KV, because the time to the first token would reveal
    whether another owner sent the same prompt."""
    return f"{owner} {asked}" if owner else asked


async def unpacked(packed: bytes) -> list[int]:
    """Unpacks a prompt of a prepared call."""
    ids: list[int] = []
    step = 4 * _STEP_IDS
    for start in range(0, len(packed), step):
        if start:
            # Lets streams continue.
            await asyncio.sleep(0)
        ids += ids_of(packed[start : start + step])
    return ids
