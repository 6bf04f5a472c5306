"""From a body that a client sent, or a line of a batch job, to a generation and the shape of its answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from alignedserve.gateway.answers import ChatAnswer, CompletionAnswer
from alignedserve.gateway.bodies import ChatBody, CompletionBody
from alignedserve.gateway.generation import Generation
from alignedserve.gateway.islands import Islands
from alignedserve.gateway.lengths import Lengths
from alignedserve.gateway.limits import Limits
from alignedserve.gateway.model import ServedModel
from alignedserve.gateway.service import Service
from alignedserve.gateway.structure import check_structure
from alignedserve.gateway.tools import readable, reader_of
from alignedserve.lengths.config import NONE, LengthConfig
from alignedserve.sampling_params import SamplingParams


@dataclass(frozen=True)
class Intake:
    """Raises ApiError and InvalidRequest; what comes out has not been started."""

    model: ServedModel
    islands: Islands
    limits: Limits = field(default_factory=Limits)
    lengths: Lengths = field(default_factory=lambda: Lengths(LengthConfig(NONE)))

    async def completion(self, body: CompletionBody, service: Service) -> tuple[Generation, CompletionAnswer]:
        params = await self._params(body, len(body.prompts))
        prompts = [await self.model.prompt_ids(prompt) for prompt in body.prompts]
        answer = CompletionAnswer(
            self.model,
            int(time.time()),
            body.logprobs is not None,
            service.name,
            num_made=params.n,
            num_given=body.n or 1,
            echoes=[self.model.text_of("prompt", prompt) for prompt in prompts] if body.echo else None,
        )
        return await self._generation(prompts, params, service), answer

    async def chat(self, body: ChatBody, service: Service) -> tuple[Generation, ChatAnswer]:
        params = await self._params(body, num_prompts=1)
        new_reader = None
        variables = dict(body.chat_template_kwargs or {})
        if body.called_tools:
            new_reader = reader_of(body.tool_choice or "auto", self.model.tool_template)
            variables["tools"] = [tool.model_dump(exclude_none=True) for tool in body.called_tools]
        prompts = [await self.model.chat_ids(readable(body.messages), variables)]
        answer = ChatAnswer(
            self.model, int(time.time()), bool(body.logprobs), service.name, new_reader=new_reader
        )
        return await self._generation(prompts, params, service), answer

    async def _params(self, body: CompletionBody | ChatBody, num_prompts: int) -> SamplingParams:
        self.model.check_name(body.model)
        params = body.sampling_params()
        self.limits.check(num_prompts, params)
        await check_structure(self.model, self.limits, params, body.structure_name)
        return params

    async def _generation(
        self, prompts: Sequence[list[int]], params: SamplingParams, service: Service
    ) -> Generation:
        for prompt in prompts:
            self.limits.check_prompt(len(prompt))
            self.model.check(prompt, params)
        predictions = await self.lengths.predict(prompts, params, service.tier)
        return Generation(self.islands, self.model, prompts, params, service, predictions)
