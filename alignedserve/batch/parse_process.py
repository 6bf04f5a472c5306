"""A child process that parses long lines for the gateway (child.py), which would otherwise block its event loop."""

from __future__ import annotations

import resource
import sys

import msgspec

from alignedserve.batch.parse import LineProblem, Parsed, Wrong, parse
from alignedserve.process.child import read_frame, write_frame

# A line with a million unknown names takes a hundred times its size.
MAX_MEMORY_BYTES = 2 << 30
# A request is a line's number, in this many bytes, followed by the line.
NUMBER_BYTES = 4


class ParsedOrWrong(msgspec.Struct, frozen=True):
    """The parsed line, or what is wrong with it; exactly one of them is set."""

    parsed: Parsed | None = None
    wrong: Wrong | None = None


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    while (content := read_frame(sys.stdin.buffer)) is not None:
        write_frame(sys.stdout.buffer, msgspec.msgpack.encode(_answer(content)))


def _answer(content: bytes) -> ParsedOrWrong:
    try:
        return ParsedOrWrong(
            parsed=parse(content[NUMBER_BYTES:], int.from_bytes(content[:NUMBER_BYTES], "big"))
        )
    except LineProblem as error:
        return ParsedOrWrong(wrong=error.wrong)


if __name__ == "__main__":
    main()
