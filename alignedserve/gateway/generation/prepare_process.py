"""A process that prepares bodies for the gateway (endpoint.py), within limits of time and memory.

It gets the model's description first, whose tokenizer and chat templates it tries, and then one body after the other
(child.py). A signal of its timers ends it when that takes too long, whatever it is doing; where memory
runs out it reports that, or a library ends it.
"""

from __future__ import annotations

import io
import os
import resource
import signal
import sys

import msgspec
from tokenizers import Tokenizer as Backend

from alignedserve.engine.validate import Vocabulary
from alignedserve.gateway.generation.endpoint import (
    Beside,
    ConversationNeeded,
    Endpoint,
    Endpoints,
    Expands,
    Needed,
)
from alignedserve.gateway.http.errors import ApiError
from alignedserve.gateway.limits import Limits
from alignedserve.gateway.model import ServedModel
from alignedserve.process.child import frame, read_frame, write_frame
from alignedserve.text.tokenizer import Tokenizer
from alignedserve.text.tokenizer_files import TokenizerFiles

# 8 MB of text become 8 million tokens at most, and take some 2 GB on their way.
MAX_MEMORY_BYTES = 4 << 30
# Memory that a body took is not all freed: a process that has had this much more than at its start ends, and another
# takes its place.
MAX_KEPT_BYTES = 1 << 30
# The status with which it ends if the model takes too much memory at the start.
OUT_OF_MEMORY = 3
# What its process adds to the gateway's niceness: streams take precedence over bodies that are not small.
NICENESS = 5


class TokenizerParts(msgspec.Struct, frozen=True):
    backend: str
    special_tokens: dict[str, str]
    chat_templates: dict[str, str]


class Greeting(msgspec.Struct, frozen=True):
    """The description of the model that the process needs."""

    name: str
    max_model_len: int
    vocabulary_size: int
    eos_token_ids: list[int]
    tokenizer: TokenizerParts | None
    parses_special_tokens: bool
    embedding_size: int | None
    limits: Limits
    is_strict: bool
    # The seconds of a processor in which the process must be ready for bodies.
    start_s: float
    adapters: tuple[str, ...] = ()

    def model(self) -> ServedModel:
        vocabulary = Vocabulary(self.vocabulary_size, frozenset(self.eos_token_ids))
        tokenizer = None
        if parts := self.tokenizer:
            backend = Backend.from_str(parts.backend)
            files = TokenizerFiles(backend, parts.special_tokens, parts.chat_templates)
            tokenizer = Tokenizer(files, self.name)
        parses = self.parses_special_tokens
        return ServedModel(
            self.name,
            tokenizer,
            vocabulary,
            self.max_model_len,
            parses,
            self.embedding_size,
            adapters=self.adapters,
        )


class Asked(msgspec.Struct, frozen=True):
    """What is asked for with a body. A frame holds the length of this, this, the conversation before the call if there
    is one, and then the body as it came."""

    endpoint: str
    timeout_s: float
    # What the process adds to the gateway's niceness, from this body on.
    niceness: int
    # The seconds of a processor that it may take, if they are limited, too.
    cpu_s: float | None = None
    # The size of the conversation in bytes; None: there is none.
    num_earlier_bytes: int | None = None
    # See Beside.
    room: int | None = None

    @property
    def head(self) -> bytes:
        return frame(msgspec.msgpack.encode(self))

    @staticmethod
    def taken_from(content: bytes) -> tuple[Asked, Beside, bytes]:
        """Returns this, what is beside the body, and the body from a frame."""
        source = io.BytesIO(content)
        head = read_frame(source)
        assert head is not None
        asked = msgspec.msgpack.decode(head, type=Asked)
        num_bytes = asked.num_earlier_bytes
        earlier = None if num_bytes is None else source.read(num_bytes)
        return asked, Beside(earlier, asked.room), source.read()


class Told(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer; exactly one of these is set."""

    # A call or an answer, encoded: its type is known to the endpoint. It is not copied, as it may have megabytes.
    made: memoryview | None = None
    # (status, message, param, code) of an ApiError.
    error: tuple[int, str, str | None, str | None] | None = None
    # What the call goes on with, which is needed.
    needed: Needed | None = None
    # The size in bytes of what the call refers to, for which there is another lane.
    num_added_bytes: int | None = None
    # The name of an exception that is a bug of ours, and where it was raised.
    failure: str | None = None


def main(endpoints: Endpoints) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    source, answers = sys.stdin.buffer, sys.stdout.buffer
    if (content := read_frame(source)) is None:
        return
    told = msgspec.msgpack.decode(content, type=Greeting)
    del content
    signal.setitimer(signal.ITIMER_PROF, told.start_s)
    try:
        model = told.model()
        model.warm_up()
        model.try_out()
    except MemoryError:
        sys.exit(OUT_OF_MEMORY)
    signal.setitimer(signal.ITIMER_PROF, 0)
    max_bytes, niceness = most_bytes() + MAX_KEPT_BYTES, os.nice(0)
    write_frame(answers, b"")
    while (content := read_frame(source)) is not None:
        write_frame(answers, _answer(content, endpoints, model, told, niceness))
        del content
        if most_bytes() > max_bytes:
            return


def most_bytes() -> int:
    """Returns the most memory that this process has had. (What getrusage says of that counts the process that started
    it, too, which may have had more.)"""
    with open("/proc/self/status", "rb") as file:
        found = dict(line.split(b":", 1) for line in file)
    # Not every sandbox counts the most.
    return 1024 * int(found.get(b"VmHWM", found[b"VmRSS"]).split()[0])


def _answer(
    content: bytes, endpoints: Endpoints, model: ServedModel, greeting: Greeting, niceness: int
) -> bytes:
    """`niceness` is what this process started with."""
    asked, beside, body = Asked.taken_from(content)
    os.nice(max(0, niceness + asked.niceness - os.nice(0)))
    signal.setitimer(signal.ITIMER_REAL, asked.timeout_s)
    signal.setitimer(signal.ITIMER_PROF, asked.cpu_s or 0)
    try:
        return msgspec.msgpack.encode(_told(endpoints[asked.endpoint], body, beside, model, greeting))
    except MemoryError:
        return msgspec.msgpack.encode(Told(error=(400, "the body takes too much memory to read", None, None)))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)


def _told(endpoint: Endpoint, body: bytes, beside: Beside, model: ServedModel, greeting: Greeting) -> Told:
    try:
        made = endpoint.prepare_encoded(body, model, greeting.limits, greeting.is_strict, beside)
        return Told(made=memoryview(made))
    except ConversationNeeded as error:
        return Told(needed=error.needed)
    except Expands as error:
        return Told(num_added_bytes=error.num_bytes)
    except ApiError as error:
        return Told(error=(error.status, error.message, error.param, error.code))
    except MemoryError:
        raise
    except Exception as error:
        return Told(failure=f"{type(error).__name__} at {_place(error)}")


def _place(error: BaseException) -> str:
    """Returns where the exception was raised. Its message is left out, as it may contain what a client sent."""
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else "?"
