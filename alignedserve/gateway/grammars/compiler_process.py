"""The gateway's side of the process that compiles grammars (text/grammar_process.py). The process starts when it is
first needed, and again after it has ended. Unlike a Child, it works on several grammars at once, each in a fork, and
outlives those that take too long."""

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
from alignedserve.process.child import ENDED, ChildEnded, NotStarted, Starter, hear, tell
from alignedserve.structured_outputs import StructuredOutputsParams
from alignedserve.text import grammar_process
from alignedserve.text.tokenizer import Tokenizer

# Seconds that the process has to load its vocabulary, which takes up to 2 s: other processes may have the cores.
START_S = 300.0


class CompilerProcess:
    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
        self._starter = Starter(
            grammar_process.__name__,
            lambda: (_greeting(tokenizer, vocabulary),),
            START_S,
            environment=grammar_process.ENVIRONMENT,
        )
        self._starting: asyncio.Task[_Running] | None = None

    async def started(self) -> _Running:
        """Returns the running process. Raises NotStarted if the vocabulary can't be loaded, and OSError if the machine
        can't start a process."""
        if self._starting is None or _is_over(self._starting):
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def compile(
        self, wanted: StructuredOutputsParams, timeout_s: float, cpu_s: float
    ) -> dict[str, Any]:
        """Returns the `problem` of the grammar, which may be None, or how the compilation `ended`. Raises ChildEnded,
        and OSError if the machine can't start a process."""
        asked = {
            "kind": wanted.kind,
            "value": getattr(wanted, wanted.kind),
            "thoughts": wanted.thoughts and asdict(wanted.thoughts),
        }
        running = await self.started()
        return await running.ask(asked | {"timeout_s": timeout_s, "cpu_s": cpu_s})

    async def aclose(self) -> None:
        """Ends the process. No grammar is compiled afterwards."""
        await self._starter.aclose()
        if self._starting is not None:
            with contextlib.suppress(NotStarted, OSError):
                await (await self._starting).aclose()

    async def _start(self) -> _Running:
        try:
            return _Running(await self._starter.take())
        except NotStarted as failed:
            raise failed.error or failed from None


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
            raise ChildEnded(await self.process.wait())
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            with contextlib.suppress(ConnectionError):
                # `_read` notices it, too.
                await tell(self.process, json.dumps(asked | {"number": number}).encode())
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
                answer = json.loads(await hear(self.process))
                asked = self._asked.get(answer["number"])
                if asked is not None and not asked.done():
                    asked.set_result(answer)
        except ENDED:
            self.has_ended = True
            # Not killed again: that could take its exit status from the task that waits for it.
            status = await self.process.wait()
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(ChildEnded(status))


def _greeting(tokenizer: Tokenizer, vocabulary: Vocabulary) -> bytes:
    tokens = {"size": vocabulary.size, "eos_token_ids": sorted(vocabulary.eos_token_ids)}
    return json.dumps(tokens | {"tokenizer": tokenizer.backend.to_str()}).encode()


def _is_over(starting: asyncio.Task[_Running]) -> bool:
    return starting.done() and (starting.exception() is not None or starting.result().has_ended)
