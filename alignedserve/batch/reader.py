"""Lines taken apart: short ones here and now, long ones in a process of their own (parse_process.py)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys

import msgspec

from alignedserve.batch import parse_process
from alignedserve.batch.config import STEP_BYTES
from alignedserve.batch.lines import Line
from alignedserve.batch.parse import LineProblem, Parsed, parse
from alignedserve.store import Problem

# The longest line takes a fraction of a second: a process that takes so long hangs.
TIMEOUT_S = 30.0
# what is heard from a process that has ended, or hangs
_FAILED = (asyncio.IncompleteReadError, ConnectionError, TimeoutError)

_answers = msgspec.msgpack.Decoder(tuple[Parsed | None, Problem | None])


class LineReader:
    """Starts its process when it is first needed."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def parsed(self, line: Line) -> Parsed:
        """Raises LineProblem."""
        if line.text is None or len(line.text) <= STEP_BYTES:
            return parse(line.text, line.number)
        async with self._turn:
            # it may have died of something else
            for _ in range(2):
                try:
                    return await self._asked(line.number, line.text)
                except _FAILED:
                    await self.aclose()
                except asyncio.CancelledError:
                    # its answer would be taken for the next one's
                    await self.aclose()
                    raise
        raise LineProblem(Problem("invalid_json_line", "this line can't be read", line.number))

    async def aclose(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _asked(self, number: int, text: bytes) -> Parsed:
        process = await self._started()
        assert process.stdin and process.stdout
        async with asyncio.timeout(TIMEOUT_S):
            process.stdin.write(parse_process.head_of(number, text))
            process.stdin.write(text)
            await process.stdin.drain()
            size = int.from_bytes(await process.stdout.readexactly(4), "big")
            found, problem = _answers.decode(await process.stdout.readexactly(size))
        if problem:
            raise LineProblem(problem)
        assert found
        return found

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                parse_process.__name__,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
                # a ctrl-C in the terminal is not for it: it ends when its stdin does
                start_new_session=True,
            )
        return self._process
