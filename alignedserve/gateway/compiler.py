"""Schemas, regexes and grammars, tried in a process of their own (text/grammar_process.py): one that takes too long, or
too much memory, ends with it. Instances compile them again; what is refused here never gets there.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
from collections import OrderedDict
from typing import Any

from alignedserve.engine.validate import Vocabulary
from alignedserve.structured_outputs import StructuredOutputsParams
from alignedserve.text import grammar_process
from alignedserve.text.tokenizer import Tokenizer
from alignedserve.types import InvalidRequest

# Answers that are kept: a hash and a line of text each.
MAX_KEPT = 4096
# Who comes when others' grammars take their whole time, one after the other, does not wait for ever.
TURN_S = 10.0
# what is heard from a process that has ended
_ENDED = (asyncio.IncompleteReadError, ConnectionError)

logger = logging.getLogger(__name__)


class NoTurn(Exception):
    """Others' grammars are being compiled all the time."""


class Compiler:
    """Starts its process when it is first needed."""

    def __init__(self, tokenizer: Tokenizer | None, vocabulary: Vocabulary) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        # what was wrong with it; None: nothing
        self._kept: OrderedDict[bytes, str | None] = OrderedDict()
        self._asking: set[asyncio.Task[str | None]] = set()

    async def prepare(self) -> None:
        """What takes time now, the first grammar need not wait for."""
        async with self._turn:
            try:
                await self._started()
            except _ENDED:
                logger.warning(
                    "grammars: the vocabulary could not be taken in, status %d", await self._status()
                )

    async def check(self, wanted: StructuredOutputsParams, timeout_s: float) -> None:
        """Raises InvalidRequest that says what is wrong with it, TimeoutError, and NoTurn."""
        key = hashlib.sha256(f"{wanted.kind} {wanted.text}".encode()).digest()
        if key not in self._kept:
            # whoever leaves meanwhile leaves it going on: an answer must not be taken for another one's
            asking = asyncio.create_task(self._ask(wanted, timeout_s))
            self._asking.add(asking)
            asking.add_done_callback(self._over)
            self._keep(key, await asyncio.shield(asking))
        self._kept.move_to_end(key)
        if (reason := self._kept[key]) is not None:
            raise InvalidRequest(reason)

    async def aclose(self) -> None:
        for asking in self._asking:
            asking.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)
        if self._process is not None:
            # it may be in the middle of something
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._status()

    def _keep(self, key: bytes, reason: str | None) -> None:
        self._kept[key] = reason
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)

    def _over(self, asking: asyncio.Task[str | None]) -> None:
        self._asking.discard(asking)
        if not asking.cancelled():
            # heard by whoever waits, if anyone does
            asking.exception()

    async def _ask(self, wanted: StructuredOutputsParams, timeout_s: float) -> str | None:
        try:
            await asyncio.wait_for(self._turn.acquire(), TURN_S)
        except TimeoutError:
            raise NoTurn from None
        try:
            process = await self._started()
            if process is None:
                return "structured_outputs: needs a tokenizer and an end of sequence, and this model has not both"
            asked = {"kind": wanted.kind, "value": getattr(wanted, wanted.kind), "timeout_s": timeout_s}
            return await _tell(process, asked)
        except _ENDED:
            if await self._status() == -signal.SIGALRM:
                raise TimeoutError from None
            return f"structured_outputs.{wanted.kind}: too large to be compiled"
        finally:
            self._turn.release()

    async def _started(self) -> asyncio.subprocess.Process | None:
        """None: with this model there are no grammars."""
        if self._tokenizer is None or not self._vocabulary.eos_token_ids:
            return None
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                grammar_process.__name__,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
                # a ctrl-C in the terminal is not for it: it ends when its stdin does
                start_new_session=True,
            )
            await _tell(self._process, self._vocabulary_frame(self._tokenizer))
        return self._process

    def _vocabulary_frame(self, tokenizer: Tokenizer) -> dict[str, Any]:
        return {
            "tokenizer": tokenizer.backend.to_str(),
            "size": self._vocabulary.size,
            "eos_token_ids": sorted(self._vocabulary.eos_token_ids),
        }

    async def _status(self) -> int:
        """Of the process, which has ended. (To kill it once more could take its status from whoever waits for it.)"""
        process, self._process = self._process, None
        return 0 if process is None else await process.wait()


async def _tell(process: asyncio.subprocess.Process, value: dict[str, Any]) -> str | None:
    assert process.stdin and process.stdout
    process.stdin.write(grammar_process.frame(value))
    await process.stdin.drain()
    size = int.from_bytes(await process.stdout.readexactly(4), "big")
    answer: str | None = json.loads(await process.stdout.readexactly(size))
    return answer
