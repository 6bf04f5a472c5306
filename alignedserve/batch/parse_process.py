"""A process that takes long lines apart for another one, whose event loop would stand still meanwhile.

On stdin, one line after the other: eight bytes of number and of length, four each, and its bytes. On stdout after each
four bytes of length, and a Parsed or a Problem as msgpack. It ends with its stdin.
"""

from __future__ import annotations

import resource
import sys

import msgspec

from alignedserve.batch.config import MAX_LINE_BYTES
from alignedserve.batch.parse import LineProblem, parse

# A line of a million names of which none is ours takes a hundred times its bytes.
MAX_MEMORY_BYTES = 2 << 30


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    source, answers = sys.stdin.buffer, sys.stdout.buffer
    while head := source.read(8):
        number, size = int.from_bytes(head[:4], "big"), int.from_bytes(head[4:], "big")
        assert size <= MAX_LINE_BYTES
        answer = msgspec.msgpack.encode(_answer(source.read(size), number))
        answers.write(len(answer).to_bytes(4, "big") + answer)
        answers.flush()


def head_of(number: int, text: bytes) -> bytes:
    return number.to_bytes(4, "big") + len(text).to_bytes(4, "big")


def _answer(text: bytes, number: int) -> object:
    """A pair: what was found, and what is wrong; one of both is None."""
    try:
        return parse(text, number), None
    except LineProblem as error:
        return None, error.problem


if __name__ == "__main__":
    main()
