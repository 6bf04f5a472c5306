"""A process that compiles grammars for another one, and can be stopped at it, which a thread can't.

On stdin, frames of four bytes of length and then JSON: first the vocabulary, then one grammar after the other with the
time that it may take. On stdout after each what is wrong with it, or null. Whoever reads no answer but the end learns
from the signal why: SIGALRM ended it, in time, whatever it was doing. It ends with its stdin.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from typing import Any, BinaryIO

from tokenizers import Tokenizer as Backend

from alignedserve.structured_outputs import StructuredOutputsParams
from alignedserve.text.grammar import Grammars
from alignedserve.text.tokenizer import Tokenizer
from alignedserve.text.tokenizer_files import TokenizerFiles
from alignedserve.types import InvalidRequest

# A large vocabulary takes some hundred MB; a grammar that takes this much is none.
MAX_MEMORY_BYTES = 4 << 30


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    source, answers = sys.stdin.buffer, sys.stdout.buffer
    if (vocabulary := read_frame(source)) is None:
        return
    grammars = _grammars(vocabulary)
    grammars.prepare()
    _answer(answers, None)
    while (asked := read_frame(source)) is not None:
        signal.setitimer(signal.ITIMER_REAL, asked["timeout_s"])
        found = _problem(grammars, asked)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _answer(answers, found)


def frame(value: Any) -> bytes:
    data = json.dumps(value).encode()
    return len(data).to_bytes(4, "big") + data


def read_frame(source: BinaryIO) -> Any:
    """None at the end."""
    size = source.read(4)
    return json.loads(source.read(int.from_bytes(size, "big"))) if size else None


def _grammars(vocabulary: Any) -> Grammars:
    tokenizer = Tokenizer(TokenizerFiles(Backend.from_str(vocabulary["tokenizer"]), {}, {}))
    return Grammars(lambda: tokenizer, vocabulary["size"], frozenset(vocabulary["eos_token_ids"]))


def _problem(grammars: Grammars, asked: Any) -> str | None:
    try:
        grammars.check(StructuredOutputsParams(**{asked["kind"]: asked["value"]}))
    except InvalidRequest as error:
        return str(error)
    return None


def _answer(answers: BinaryIO, value: str | None) -> None:
    answers.write(frame(value))
    answers.flush()


if __name__ == "__main__":
    main()
