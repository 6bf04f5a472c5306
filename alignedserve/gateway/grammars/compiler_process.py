"""The gateway's side of the process that compiles grammars (text/grammar_process.py). The process starts when it is
first needed, and again after it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from dataclasses import asdict
from itertools import count
from typing import Any

from alignedserve.engine.request import Vocabulary
from alignedserve.process.child import ENDED, hear, start, tell
from alignedserve.structured_outputs import StructuredOutputsParams
from alignedserve.text import grammar_process
from alignedserve.text.tokenizer import Tokenizer


class ProcessEnded(Exception):
    """The process ended before it answered. The message says how."""


class CompilerProcess:
    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._starting: asyncio.Task[_Running] | None = None
        self._is_closed = False

    async def started(self) -> _Running:
        """Returns the running process. Raises ProcessEnded if the vocabulary can't be loaded."""
        if self._is_closed:
            raise ProcessEnded("it is closed")
        if self._starting is None or _is_over(self._starting):
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def compile(
        self, wanted: StructuredOutputsParams, timeout_s: float, cpu_s: float
    ) -> dict[str, Any]:
        """Returns the `problem` of the grammar, which may be None, or how the compilation `ended`. Raises
        ProcessEnded."""
        asked = {
            "kind": wanted.kind,
            "value": getattr(wanted, wanted.kind),
            "thoughts": wanted.thoughts and asdict(wanted.thoughts),
        }
        running = await self.started()
        return await running.ask(asked | {"timeout_s": timeout_s, "cpu_s": cpu_s})

    async def aclose(self) -> None:
        """Ends the process. No grammar is compiled afterwards."""
        self._is_closed = True
        if self._starting is not None:
            with contextlib.suppress(ProcessEnded):
                await (await self._starting).aclose()

    async def _start(self) -> _Running:
        process = await start(grammar_process.__name__, grammar_process.ENVIRONMENT)
        try:
            await _tell(process, self._vocabulary_frame())
            await _heard(process)
        except ENDED as error:
            raise ProcessEnded(f"status {await process.wait()}") from error
        return _Running(process)

    def _vocabulary_frame(self) -> dict[str, Any]:
        return {
            "tokenizer": self._tokenizer.backend.to_str(),
            "size": self._vocabulary.size,
            "eos_token_ids": sorted(self._vocabulary.eos_token_ids),
        }


class _Running:
    """A process that has loaded its vocabulary."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.has_ended = False
        self._numbers = count()
        # The pending answers, by number.
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.create_task(self._read())

    async def ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        if self.has_ended:
            raise ProcessEnded("before it was asked")
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            with contextlib.suppress(ConnectionError):
                # `_read` notices it, too.
                await _tell(self.process, asked | {"number": number})
            return await answer
        finally:
            del self._asked[number]

    async def aclose(self) -> None:
        """Kills the process and its children, which may be busy."""
        if not self.has_ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        await self._reading

    async def _read(self) -> None:
        try:
            while True:
                answer = await _heard(self.process)
                asked = self._asked.get(answer["number"])
                if asked is not None and not asked.done():
                    asked.set_result(answer)
        except ENDED:
            self.has_ended = True
            # Not killed again: that could take its exit status from the task that waits for it.
            status = await self.process.wait()
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(ProcessEnded(f"status {status}"))


def _is_over(starting: asyncio.Task[_Running]) -> bool:
    return starting.done() and (starting.exception() is not None or starting.result().has_ended)


async def _tell(process: asyncio.subprocess.Process, value: dict[str, Any]) -> None:
    await tell(process, json.dumps(value).encode())


async def _heard(process: asyncio.subprocess.Process) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(await hear(process))
    return answer
