"""A child process that prepares bodies for the gateway (endpoint.py), within limits of time and memory.

It receives a description of the model, tries its tokenizer and chat templates, and then takes one body after another
(child.py). A timer's signal ends the process when a body takes too long, whatever it is doing. If memory runs out, the
process reports that, or a library aborts it.
"""

from __future__ import annotations

import io
import os
import resource
import signal
import sys

import msgspec
from tokenizers import Tokenizer as Backend

from alignedserve.engine.request import Vocabulary
from alignedserve.gateway.generation.endpoint import (
    Beside,
    ConversationNeeded,
    Endpoint,
    Endpoints,
    Expands,
    Needed,
)
from alignedserve.gateway.http.errors import ApiError
from alignedserve.gateway.limits.limits import CallLimits
from alignedserve.gateway.model.served_model import ServedModel
from alignedserve.process.child import frame, read_frame, write_frame
from alignedserve.text.tokenizer import Tokenizer
from alignedserve.text.tokenizer_files import TokenizerFiles

# 8 MB of text become at most 8 million tokens, which takes about 2 GB on the way.
MAX_MEMORY_BYTES = 4 << 30
# Memory is not all freed after a body. A process ends when its peak has grown by more than this since its start, and
# another replaces it.
MAX_KEPT_BYTES = 1 << 30
# Exit status if the model takes too much memory at the start.
OUT_OF_MEMORY = 3
# Added to the gateway's niceness by processes of larger bodies: streams take precedence over them. It is that of an
# engine's threads on a CPU, so that both go on.
NICENESS = 10


class TokenizerParts(msgspec.Struct, frozen=True):
    backend: str
    special_tokens: dict[str, str]
    chat_templates: dict[str, str]


class ModelDescription(msgspec.Struct, frozen=True):
    """The description of the model, sent first."""

    name: str
    max_model_len: int
    vocabulary_size: int
    eos_token_ids: list[int]
    tokenizer: TokenizerParts | None
    parses_special_tokens: bool
    embedding_size: int | None
    limits: CallLimits
    is_strict: bool
    # CPU seconds within which the process must be ready for bodies.
    start_s: float

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
        )


class PrepareRequest(msgspec.Struct, frozen=True):
    """What to do with a body. A frame holds the length of this record, the record, the items of the earlier
    conversation if there is one, and the body unchanged."""

    endpoint: str
    timeout_s: float
    # Added to the gateway's niceness, from this body on.
    niceness: int
    # CPU seconds that the body may take, if they are limited, too.
    cpu_s: float | None = None
    # Size of the earlier conversation, in bytes. None: there is none.
    num_earlier_bytes: int | None = None
    # See Beside.
    room: int | None = None
    # See ServedModel. They may have changed since the last body.
    adapters: dict[str, str] = {}

    @property
    def head(self) -> bytes:
        return frame(msgspec.msgpack.encode(self))

    @staticmethod
    def taken_from(content: bytes) -> tuple[PrepareRequest, Beside, bytes]:
        """Returns this record, what is beside the body, and the body of a frame."""
        source = io.BytesIO(content)
        head = read_frame(source)
        assert head is not None
        asked = msgspec.msgpack.decode(head, type=PrepareRequest)
        num_bytes = asked.num_earlier_bytes
        earlier = None if num_bytes is None else source.read(num_bytes)
        return asked, Beside(earlier, asked.room), source.read()


class PrepareReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer. Exactly one field is set."""

    # A call or an answer, encoded. The endpoint determines its type. Not copied, since it may have megabytes.
    made: memoryview | None = None
    # (status, message, param, code) of an ApiError.
    error: tuple[int, str, str | None, str | None] | None = None
    # The response or conversation that the call continues, and that has to be passed.
    needed: Needed | None = None
    # Size in bytes of what the call refers to, if it is too large for this lane.
    num_added_bytes: int | None = None
    # The type of an unexpected exception, which is a bug of ours, and the place that raised it.
    failure: str | None = None


def main(endpoints: Endpoints) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    source, answers = sys.stdin.buffer, sys.stdout.buffer
    if (content := read_frame(source)) is None:
        return
    told = msgspec.msgpack.decode(content, type=ModelDescription)
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
    """Returns the peak memory of this process. (The peak of getrusage includes the process that forked it, which may
    have had more.)"""
    with open("/proc/self/status", "rb") as file:
        found = dict(line.split(b":", 1) for line in file)
    # Some sandboxes do not report the peak.
    return 1024 * int(found.get(b"VmHWM", found[b"VmRSS"]).split()[0])


def _answer(
    content: bytes, endpoints: Endpoints, model: ServedModel, description: ModelDescription, niceness: int
) -> bytes:
    """`niceness` is the niceness at this process's start."""
    asked, beside, body = PrepareRequest.taken_from(content)
    os.nice(max(0, niceness + asked.niceness - os.nice(0)))
    signal.setitimer(signal.ITIMER_REAL, asked.timeout_s)
    signal.setitimer(signal.ITIMER_PROF, asked.cpu_s or 0)
    model.set_adapters(asked.adapters)
    try:
        return msgspec.msgpack.encode(_told(endpoints[asked.endpoint], body, beside, model, description))
    except MemoryError:
        return msgspec.msgpack.encode(
            PrepareReply(error=(400, "the body takes too much memory to read", None, None))
        )
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)


def _told(
    endpoint: Endpoint, body: bytes, beside: Beside, model: ServedModel, description: ModelDescription
) -> PrepareReply:
    try:
        made = endpoint.prepare_encoded(body, model, description.limits, description.is_strict, beside)
        return PrepareReply(made=memoryview(made))
    except ConversationNeeded as error:
        return PrepareReply(needed=error.needed)
    except Expands as error:
        return PrepareReply(num_added_bytes=error.num_bytes)
    except ApiError as error:
        return PrepareReply(error=(error.status, error.message, error.param, error.code))
    except MemoryError:
        raise
    except Exception as error:
        return PrepareReply(failure=f"{type(error).__name__} at {_place(error)}")


def _place(error: BaseException) -> str:
    """Returns where the exception was raised, without its message, which may contain parts of a request."""
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else "?"
