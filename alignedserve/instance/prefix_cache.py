"""What prompts that begin alike share: the KV of their first blocks, of those that run and of those that have gone.

A block can be shared as soon as its KV is computed, and until its room is needed (`engine/blocks.py`). Prompts share
blocks only with the same salt, if they bring one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from alignedserve.engine.request import Request
from alignedserve.instance.executor import Executor
from alignedserve.instance.requests import id_of
from alignedserve.protocol.messages import Work
from alignedserve.scheduling.block_hashes import BlockHasher
from alignedserve.types import RequestKey


@dataclass(slots=True)
class Beginning:
    """Of a prompt."""

    # of its full blocks
    names: list[bytes]
    # tokens whose KV was there when it started
    num_found: int = 0
    # blocks that others may share
    num_named: int = 0
    # what comes after the full blocks: tokens, and of what they are a part
    tail: list[int] = field(default_factory=list)
    num_output: int = 0
    namer: BlockHasher | None = None


class PrefixCache:
    """See `shares.PrefixLookup`."""

    def __init__(self, engine: Executor, is_enabled: bool) -> None:
        self._engine = engine
        self.is_enabled = is_enabled
        self._block_size = engine.format.block_size
        # of prompts that wait
        self._waiting: dict[RequestKey, Beginning] = {}
        self._num_asked = self._num_found = 0

    def names(self, work: Work) -> Sequence[bytes]:
        if not self.is_enabled or work.num_cached:
            return ()
        beginning = self._waiting[work.request.key] = self._beginning(work)
        return self._usable(work, beginning)

    def num_found(self, names: Sequence[bytes]) -> int:
        return self._engine.num_known(names)

    def take(self, work: Work) -> int:
        """In the middle of a plan; `start` follows before the next one."""
        beginning = self._waiting.get(work.request.key)
        if beginning is None:
            return 0
        if usable := self._usable(work, beginning):
            beginning.num_found = self._engine.share(id_of(work.request.key), usable)
            # these have their names, or have lost them
            beginning.num_named = beginning.num_found // self._block_size
        if _shares(work):
            self._num_asked += len(work.request.prompt) + len(work.output)
            self._num_found += beginning.num_found
        return beginning.num_found

    def start(self, work: Work) -> Beginning:
        return self._waiting.pop(work.request.key, None) or self._beginning(work)

    def forget(self, key: RequestKey) -> None:
        """It will not start, or not soon."""
        self._waiting.pop(key, None)

    def forget_waiting(self) -> None:
        self._waiting.clear()

    def computed(self, request: Request, beginning: Beginning) -> None:
        """More of it than before, and others may share that."""
        first, end = beginning.num_named, request.num_computed // self._block_size
        if beginning.names[first:end]:
            self._engine.publish_blocks(request, first, beginning.names[first:end])
            beginning.num_named = end

    def ended(self, request: Request, beginning: Beginning) -> None:
        """Others may share what it has said, too: a chat goes on from its last answer."""
        if beginning.namer is not None:
            num_more = request.num_computed - len(beginning.names) * self._block_size
            more = [*beginning.tail, *request.output[beginning.num_output :]][: max(num_more, 0)]
            beginning.names += beginning.namer.block_hashes_of(more)
            self.computed(request, beginning)

    def spoilt(self, beginning: Beginning) -> None:
        """Something is wrong with its KV, perhaps."""
        self._engine.forget_hashes(beginning.names)
        beginning.names.clear()
        beginning.namer = None

    def take_counts(self) -> tuple[int, int]:
        """Tokens of prompts that started, and how many of them had KV here; since the last call."""
        counts, self._num_asked, self._num_found = (self._num_asked, self._num_found), 0, 0
        return counts

    def _usable(self, work: Work, beginning: Beginning) -> Sequence[bytes]:
        """Of the last token the output is wanted: that is computed in any case."""
        num_tokens = len(work.request.prompt) + len(work.output)
        return beginning.names[: (num_tokens - 1) // self._block_size] if _shares(work) else ()

    def _beginning(self, work: Work) -> Beginning:
        wanted = work.request
        if not self.is_enabled:
            return Beginning([])
        tokens, namer = wanted.prompt + work.output, BlockHasher(self._block_size, wanted.cache_salt)
        names = namer.block_hashes_of(tokens)
        tail = tokens[len(names) * self._block_size :]
        return Beginning(names, tail=tail, num_output=len(work.output), namer=namer)


def _shares(work: Work) -> bool:
    """Where log-probabilities of the prompt are wanted, all of it is computed."""
    return work.request.params.prompt_logprobs is None or bool(work.output)
