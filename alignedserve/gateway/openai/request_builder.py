"""From a body that a client sent, or a line of a batch job, to a generation and the form of its answer."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from random import Random

from alignedserve.gateway.config import SloConfig
from alignedserve.gateway.grammars.compiler import Compiler
from alignedserve.gateway.grammars.structure import check_structure
from alignedserve.gateway.islands import Islands
from alignedserve.gateway.lengths import Lengths
from alignedserve.gateway.limits import Limits
from alignedserve.gateway.model import ServedModel
from alignedserve.gateway.openai.chat_response import ChatResponseBuilder
from alignedserve.gateway.openai.completion_response import CompletionResponseBuilder
from alignedserve.gateway.openai.generation import Generation
from alignedserve.gateway.openai.prepare import Prepared, ids_of
from alignedserve.gateway.openai.preparer import Preparer
from alignedserve.gateway.openai.response_builder import ResponseBuilder
from alignedserve.gateway.openai.service import Service
from alignedserve.gateway.tools.readers import reader_of
from alignedserve.lengths.config import NONE, LengthConfig

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# So many token ids are unpacked at a time, which takes a millisecond.
_STEP_IDS = 1 << 15


@dataclass(frozen=True)
class RequestBuilder:
    """Builds generations, which have not been started, and their response builders. Raises ApiError and
    InvalidRequest."""

    model: ServedModel
    islands: Islands
    compiler: Compiler
    preparer: Preparer
    limits: Limits = field(default_factory=Limits)
    slo: SloConfig = field(default_factory=SloConfig)
    lengths: Lengths = field(default_factory=lambda: Lengths(LengthConfig(NONE)))
    # Gives a seed to requests that have none.
    seeds: Random = field(default_factory=Random)

    async def build(self, call: Prepared, service: Service, owner: str) -> tuple[Generation, ResponseBuilder]:
        """`owner` is that of the request's key (http/keys.py)."""
        await check_structure(self.compiler, self.limits, call.params, call.structure_name, owner)
        prompts = [await _unpacked(packed) for packed in call.prompts]
        predictions = await self.lengths.predict(prompts, call.params, service.tier)
        generation = Generation(
            self.islands,
            self.model,
            prompts,
            call.params,
            service,
            call.structure_name,
            call.gives_output,
            # In a stream, another choice may begin before the first one does.
            asks_prompt_logprobs_once=not call.is_stream,
            predictions=predictions,
            seeds=self.seeds,
            cache_salt=_salt(owner, call.cache_salt),
        )
        return generation, self._response_builder(call, service, prompts)

    def _response_builder(
        self, call: Prepared, service: Service, prompts: list[list[int]]
    ) -> ResponseBuilder:
        now = int(time.time())
        if call.is_chat:
            return ChatResponseBuilder(
                self.model,
                now,
                call.num_logprobs,
                service.name,
                prompts=prompts,
                num_prompt_logprobs=call.num_prompt_logprobs,
                new_reader=reader_of(call.reader, call.tool_name) if call.reader else None,
            )
        return CompletionResponseBuilder(
            self.model,
            now,
            call.num_logprobs,
            service.name,
            prompts=prompts,
            num_prompt_logprobs=call.num_prompt_logprobs,
            num_made=call.params.n,
            num_given=call.num_given,
            echoes=call.echoes,
        )


def _salt(owner: str, asked: str) -> str:
    """Returns the salt: how soon an answer comes reveals whether its prompt was asked before, so owners do not share
    KV."""
    return f"{owner} {asked}" if owner else asked


async def _unpacked(packed: bytes) -> list[int]:
    ids: list[int] = []
    step = 4 * _STEP_IDS
    for start in range(0, len(packed), step):
        if start:
            # Streams go on in between.
            await asyncio.sleep(0)
        ids += ids_of(packed[start : start + step])
    return ids
