"""A process that compiles grammars for another one. Unlike a thread, it can be stopped while it compiles.

It loads the vocabulary once, and forks for each grammar. A grammar that takes too long, or too much memory, ends with
its child, and does not affect the next.

On stdin it reads frames of four bytes of length and JSON. The first is the vocabulary, the others are grammars, each
with a number and its limits of wall-clock and processor time. On stdout it writes results in any order: the number, and
the error in the grammar or null; or the number, and how the child ended. SIGALRM and SIGPROF mean that the time was up.
It ends when its stdin does.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import signal
from typing import Any, BinaryIO

from tokenizers import Tokenizer as Backend

from alignedserve.process.child import frame, read_frame
from alignedserve.structured_outputs import StructuredOutputsParams, Thoughts
from alignedserve.text.grammar import Grammars
from alignedserve.text.tokenizer import Tokenizer
from alignedserve.text.tokenizer_files import TokenizerFiles
from alignedserve.types import InvalidRequest

# A large vocabulary takes some hundred MB; no acceptable grammar takes this much.
MAX_MEMORY_BYTES = 4 << 30
# Threads do not survive a fork.
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
# The result of a child that ended by itself without an answer.
FAILED = "failed"


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    source = os.fdopen(0, "rb", buffering=0)
    if (vocabulary := _read(source)) is None:
        return
    grammars = _grammars(vocabulary)
    grammars.prepare()
    # Otherwise garbage collection would copy these objects into each child.
    gc.freeze()
    os.write(1, frame(b""))
    _serve(grammars, source)


def _serve(grammars: Grammars, source: BinaryIO) -> None:
    waiting = select.poll()
    waiting.register(source, select.POLLIN)
    # (process, number of its grammar), by the file descriptor that becomes readable when the child ends.
    numbers: dict[int, tuple[int, int]] = {}
    while True:
        for place, _ in waiting.poll():
            if place in numbers:
                waiting.unregister(place)
                _bury(place, *numbers.pop(place))
                continue
            if (asked := _read(source)) is None:
                return
            child = _fork(grammars, asked)
            ended = os.pidfd_open(child)
            numbers[ended] = child, asked["number"]
            waiting.register(ended, select.POLLIN)


def _fork(grammars: Grammars, asked: Any) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        # Otherwise a writer to this pipe would not notice that its reader has exited.
        os.close(0)
        signal.setitimer(signal.ITIMER_REAL, asked["timeout_s"])
        signal.setitimer(signal.ITIMER_PROF, asked["cpu_s"])
        found = _problem(grammars, asked)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _answer({"number": asked["number"], "problem": found})
        status = 0
    finally:
        os._exit(status)


def _bury(ended: int, child: int, number: int) -> None:
    os.close(ended)
    _, status = os.waitpid(child, 0)
    if status:
        name = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else FAILED
        _answer({"number": number, "ended": name})


def _read(source: BinaryIO) -> Any:
    """Returns the next value; None at the end."""
    found = read_frame(source)
    return None if found is None else json.loads(found)


def _grammars(vocabulary: Any) -> Grammars:
    tokenizer = Tokenizer(TokenizerFiles(Backend.from_str(vocabulary["tokenizer"]), {}, {}))
    return Grammars(lambda: tokenizer, vocabulary["size"], frozenset(vocabulary["eos_token_ids"]))


def _problem(grammars: Grammars, asked: Any) -> str | None:
    try:
        grammars.check(_wanted(asked))
    except InvalidRequest as error:
        return str(error)
    return None


def _wanted(asked: Any) -> StructuredOutputsParams:
    thoughts = Thoughts(**asked["thoughts"]) if asked["thoughts"] else None
    return StructuredOutputsParams(**{asked["kind"]: asked["value"]}, thoughts=thoughts)


def _answer(value: Any) -> None:
    """Writes the answer in one call: a write that fits a pipe does not mix with writes of other processes. An error has
    at most 500 characters."""
    data = frame(json.dumps(value).encode())
    assert len(data) <= select.PIPE_BUF
    os.write(1, data)


if __name__ == "__main__":
    main()
