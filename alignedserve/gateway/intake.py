"""From a body that a client sent, or a line of a batch job, to a generation and the shape of its answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from alignedserve.gateway.answers import ChatAnswer, CompletionAnswer
from alignedserve.gateway.bodies import ChatBody, CompletionBody
from alignedserve.gateway.compiler import Compiler
from alignedserve.gateway.generation import Generation
from alignedserve.gateway.islands import Islands
from alignedserve.gateway.lengths import Lengths
from alignedserve.gateway.limits import Limits
from alignedserve.gateway.model import ServedModel
from alignedserve.gateway.service import Service, SloConfig
from alignedserve.gateway.structure import check_structure
from alignedserve.gateway.tooling import Tooling, tooling_of
from alignedserve.gateway.tools import readable
from alignedserve.lengths.config import NONE, LengthConfig
from alignedserve.sampling_params import SamplingParams


@dataclass(frozen=True)
class Intake:
    """Raises ApiError and InvalidRequest; what comes out has not been started."""

    model: ServedModel
    islands: Islands
    compiler: Compiler
    limits: Limits = field(default_factory=Limits)
    slo: SloConfig = field(default_factory=SloConfig)
    lengths: Lengths = field(default_factory=lambda: Lengths(LengthConfig(NONE)))
    # of requests that bring none
    seeds: Random = field(default_factory=Random)

    async def completion(self, body: CompletionBody, service: Service) -> tuple[Generation, CompletionAnswer]:
        with body.naming():
            params = await self._params(body, len(body.prompts))
            prompts = [await self.model.prompt_ids(prompt) for prompt in body.prompts]
            gives_output = not body.is_only_echo
            generation = await self._generation(
                body, prompts, params, service, body.structure_name, gives_output
            )
        answer = CompletionAnswer(
            self.model,
            int(time.time()),
            body.logprobs,
            service.name,
            prompts=prompts,
            num_prompt_logprobs=body.prompt_logprobs,
            num_made=params.n,
            num_given=body.n or 1,
            echoes=[self.model.text_of("prompt", prompt) for prompt in prompts] if body.echo else None,
        )
        return generation, answer

    async def chat(self, body: ChatBody, service: Service) -> tuple[Generation, ChatAnswer]:
        with body.naming():
            tooling = tooling_of(body, self.model)
            params = await self._params(body, 1, tooling)
            variables = body.template_variables | tooling.variables
            prompts = [await self.model.chat_ids(readable(body.messages), variables)]
            name = _structure_name(body, params, tooling)
            generation = await self._generation(body, prompts, params, service, name)
        answer = ChatAnswer(
            self.model,
            int(time.time()),
            params.logprobs,
            service.name,
            prompts=prompts,
            num_prompt_logprobs=body.prompt_logprobs,
            new_reader=tooling.new_reader,
        )
        return generation, answer

    async def _params(
        self, body: CompletionBody | ChatBody, num_prompts: int, tooling: Tooling | None = None
    ) -> SamplingParams:
        tooling = tooling or Tooling()
        self.model.check_name(body.model)
        params = body.sampling_params()
        if params.structured_outputs is None:
            params.structured_outputs = tooling.structure
        if tooling.shows_special_tokens:
            params.skip_special_tokens = False
        self.limits.check(num_prompts, params)
        await check_structure(self.compiler, self.limits, params, _structure_name(body, params, tooling))
        return params

    async def _generation(
        self,
        body: CompletionBody | ChatBody,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        service: Service,
        structure_name: str,
        gives_output: bool = True,
    ) -> Generation:
        for prompt in prompts:
            self.limits.check_prompt(len(prompt), params)
            self.model.check(prompt, params)
        predictions = await self.lengths.predict(prompts, params, service.tier)
        return Generation(
            self.islands,
            self.model,
            prompts,
            params,
            service,
            structure_name,
            gives_output,
            predictions,
            self.seeds,
            body.cache_salt or "",
        )


def _structure_name(body: CompletionBody | ChatBody, params: SamplingParams, tooling: Tooling) -> str:
    """The parameter that says what the output has to look like."""
    is_of_tools = tooling.structure is not None and params.structured_outputs is tooling.structure
    return "tools" if is_of_tools else body.structure_name
