"""Scripted conversations for agents.

The demo model has not learned to call tools, so a scripted island answers behind a real gateway. The model's template
has a place for tools.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import NewType

from alignedserve.protocol.messages import Submit
from alignedserve.types import InstanceId
from tests.gateway.batching import gateway_on
from tests.gateway.scripted import TOKENIZER, ScriptedRouter, answer_of
from tests.gateway.served import served
from tests.gateway.tools.test_tools import TEMPLATE, model_with
from tests.store.redis_process import redis_running

# The prompt holds all arguments of a call, whatever the tool.
ANY_TOOL = TEMPLATE.replace("{{ call.function.arguments.city }}", "{{ call.function.arguments | tojson }}")
# Agents' own prompts and their tools may have ten thousand tokens.
MODEL = replace(model_with(ANY_TOOL), max_model_len=200_000)

Url = NewType("Url", str)


class Conversation(ScriptedRouter):
    """Answers each request with the next of `answers`, and with the last one when there are no more."""

    def __init__(self, *answers: str) -> None:
        super().__init__()
        self._answers = list(answers)

    @property
    def prompts(self) -> list[str]:
        return [TOKENIZER.decode(each.request.prompt) for each in self.submitted]

    @asynccontextmanager
    async def served(self) -> AsyncIterator[Url]:
        """Yields the address of a gateway, without a path."""
        async with served(self, model=MODEL) as at:
            yield Url(str(at.http.base_url).rstrip("/"))

    @asynccontextmanager
    async def served_with_store(self) -> AsyncIterator[Url]:
        """Does the same for a gateway that stores responses and conversations."""
        port = await self.hub.listen("127.0.0.1", 0)
        async with redis_running() as redis, gateway_on(port, redis.url, model=MODEL) as at:
            yield Url(str(at.http.base_url).rstrip("/"))
        self.hub.close()

    def answer_to(self, prompt: str) -> str:
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]

    def _submit(self, gateway: InstanceId, submit: Submit) -> None:
        self.answer = answer_of(self.answer_to(TOKENIZER.decode(submit.request.prompt)))
        super()._submit(gateway, submit)


def call_of(name: str, arguments: str) -> str:
    """Returns a call as the model writes it. `arguments`: any text that begins with a brace, as models may write."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


async def run_beside(*command: str | Path, cwd: Path, env: Mapping[str, str]) -> str:
    """Runs a program while the event loop serves it, and returns its output. Raises AssertionError if it fails."""
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        env=env,
        cwd=cwd,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, (out.decode()[-4000:], err.decode()[-4000:])
    return out.decode()
