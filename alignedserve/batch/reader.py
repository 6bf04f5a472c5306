"""Parses short lines in this process and long ones in a child process (parse_process.py)."""

from __future__ import annotations

import msgspec

from alignedserve.batch import parse_process
from alignedserve.batch.config import STEP_BYTES
from alignedserve.batch.lines import Line
from alignedserve.batch.parse import LineProblem, Parsed, Wrong, parse
from alignedserve.batch.parse_process import NUMBER_BYTES, ParsedOrWrong
from alignedserve.process.child import Child, ChildEnded, Starter
from alignedserve.store import Problem

# Seconds until the child counts as hung. The longest line takes a fraction of a second.
TIMEOUT_S = 30.0


class LineReader:
    """Parses lines. The child process starts when it is first needed."""

    def __init__(self) -> None:
        self._child = Child(Starter(parse_process.__name__), TIMEOUT_S)

    async def parsed(self, line: Line) -> Parsed:
        """Returns the parsed line. Raises LineProblem."""
        if line.text is None or len(line.text) <= STEP_BYTES:
            return parse(line.text, line.number)
        try:
            answer = await self._child.ask(line.number.to_bytes(NUMBER_BYTES, "big"), line.text)
        except ChildEnded:
            problem = Problem("invalid_json_line", "this line can't be read", line.number)
            raise LineProblem(Wrong([problem])) from None
        told = msgspec.msgpack.decode(answer, type=ParsedOrWrong)
        if told.wrong:
            raise LineProblem(told.wrong)
        assert told.parsed
        return told.parsed

    async def aclose(self) -> None:
        await self._child.aclose()
