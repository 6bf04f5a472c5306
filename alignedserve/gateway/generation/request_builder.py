"""Turns a prepared call, from a client or a line of a batch job, into a generation and its response builder."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from random import Random

import msgspec

from alignedserve.batch.results import Answer as LineAnswer
from alignedserve.gateway.generation.endpoint import Endpoints
from alignedserve.gateway.generation.generation import Generation
from alignedserve.gateway.generation.prepared import (
    Answering,
    Prepared,
    PreparedCall,
    salt_of,
    unpacked,
)
from alignedserve.gateway.generation.preparer import Preparer
from alignedserve.gateway.generation.response_builder import ResponseBuilder
from alignedserve.gateway.generation.service import Service
from alignedserve.gateway.grammars.compiler import Compiler
from alignedserve.gateway.http.errors import ApiError, invalid, unavailable
from alignedserve.gateway.http.json_pieces import blocks_of
from alignedserve.gateway.islands.islands import Islands
from alignedserve.gateway.limits.fair_queue import QueueTimeout
from alignedserve.gateway.limits.limits import Limits, SloConfig
from alignedserve.gateway.model.lengths import AnswerLengths
from alignedserve.gateway.model.served_model import ServedModel
from alignedserve.gateway.telemetry.metrics import IgnoredParameters
from alignedserve.lengths.config import NONE, LengthConfig
from alignedserve.protocol.pooling import POOLINGS
from alignedserve.sampling_params import SamplingParams
from alignedserve.types import InvalidRequest


@dataclass(frozen=True)
class RequestBuilder:
    """Builds generations, which are not started, and their response builders. Raises ApiError and InvalidRequest."""

    model: ServedModel
    islands: Islands
    compiler: Compiler
    preparer: Preparer
    limits: Limits = field(default_factory=Limits)
    slo: SloConfig = field(default_factory=SloConfig)
    lengths: AnswerLengths = field(default_factory=lambda: AnswerLengths(LengthConfig(NONE)))
    # Gives a seed to requests that have none.
    seeds: Random = field(default_factory=Random)
    ignored_parameters: IgnoredParameters = field(default_factory=IgnoredParameters)
    # How embeddings are made: one of POOLINGS.
    embedding_pooling: str = POOLINGS[0]

    async def build(self, call: Prepared, service: Service, owner: str) -> tuple[Generation, ResponseBuilder]:
        """`owner` is the owner of the call's API key (http/keys.py)."""
        await self._compile(call.params, call.structure_name, owner)
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

    async def _compile(self, params: SamplingParams, name: str, owner: str) -> None:
        """Compiles the schema or grammar, if there is one, which is the value of the parameter `name`. Raises ApiError
        with its error."""
        wanted = params.structured_outputs
        if wanted is None:
            return
        try:
            await self.compiler.check(wanted, self.limits.grammar_timeout_s, owner)
        except QueueTimeout:
            raise unavailable(f"{name}: schemas and grammars of other API keys are being compiled") from None
        except TimeoutError:
            message = f"{name}: not compiled within {self.limits.grammar_timeout_s:g} s"
            raise ApiError(400, message, param=name) from None
        except InvalidRequest as error:
            # The client knows the parameter by another name.
            raise ApiError(400, f"{name}: {str(error).partition(': ')[2]}", param=name) from error


class LineAnswers:
    def __init__(self, request_builder: RequestBuilder, endpoints: Endpoints) -> None:
        self._request_builder = request_builder
        self._endpoints = endpoints

    async def ask(
        self, endpoint: str, body: bytes, expires_at: float, owner: str, is_pressed: bool = False
    ) -> LineAnswer:
        """Returns the answer to a line. `body` is a JSON object. The job belongs to `owner`, and expires at
        `expires_at`, in seconds since 1970."""
        deadline_s = time.monotonic() + expires_at - time.time()
        service = Service("flex", "be", deadline_s=deadline_s, is_pressed=is_pressed)
        try:
            return await self._answer(endpoint, body, service, owner)
        except InvalidRequest as error:
            failure = invalid(error)
        except ApiError as error:
            failure = error
        return LineAnswer(failure.status, failure.body_for(endpoint))

    async def _answer(self, endpoint: str, body: bytes, service: Service, owner: str) -> LineAnswer:
        preparer = self._request_builder.preparer
        call = await preparer.result(self._endpoints[endpoint], [body], owner, is_best_effort=True)
        assert isinstance(call, PreparedCall)
        if isinstance(call, Prepared) and call.is_stream:
            raise InvalidRequest("stream=True: not possible in a batch")
        self._request_builder.ignored_parameters.note(call.ignored)
        pieces, usage = await call.whole(self._request_builder, service, owner)
        blocks = await blocks_of(pieces)
        return LineAnswer(200, msgspec.Raw(b"".join(blocks)), usage)
