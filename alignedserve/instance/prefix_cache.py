"""The KV that prompts with the same prefix share: that of their full blocks, running prompts and earlier ones alike.

A block can be shared as soon as its KV is computed, until it is evicted for lack of free blocks (`engine/blocks.py`).
Prompts that bring a cache salt share blocks only with prompts of the same salt.
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
    """What is known of a prompt's blocks, by which others may share its KV."""

    # The hashes of its full blocks.
    names: list[bytes]
    # The number of tokens whose KV was there when it started.
    num_found: int = 0
    # The number of its blocks that others may share.
    num_named: int = 0
    # The tokens after the full blocks, and the number of output tokens that they and the full blocks include.
    tail: list[int] = field(default_factory=list)
    num_output: int = 0
    namer: BlockHasher | None = None


class PrefixCache:
    """See `prefix_lookup.PrefixLookup`."""

    def __init__(self, engine: Executor, is_enabled: bool) -> None:
        self._engine = engine
        self.is_enabled = is_enabled
        self._block_size = engine.format.block_size
        # The hashes of the prompts which wait.
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
        """Called in the middle of a plan; `start` follows before the next plan."""
        beginning = self._waiting.get(work.request.key)
        if beginning is None:
            return 0
        if usable := self._usable(work, beginning):
            beginning.num_found = self._engine.share(id_of(work.request.key), usable)
            # These blocks are published already, or were and are no longer; either way there is nothing to publish.
            beginning.num_named = beginning.num_found // self._block_size
        if _shares(work):
            self._num_asked += len(work.request.prompt) + len(work.output)
            self._num_found += beginning.num_found
        return beginning.num_found

    def start(self, work: Work) -> Beginning:
        return self._waiting.pop(work.request.key, None) or self._beginning(work)

    def forget(self, key: RequestKey) -> None:
        """Forgets a prompt which will not start, or not soon."""
        self._waiting.pop(key, None)

    def forget_waiting(self) -> None:
        self._waiting.clear()

    def computed(self, request: Request, beginning: Beginning) -> None:
        """More of the request is computed than before, and others may share it."""
        first, end = beginning.num_named, request.num_computed // self._block_size
        if beginning.names[first:end]:
            self._engine.publish_blocks(request, first, beginning.names[first:end])
            beginning.num_named = end

    def ended(self, request: Request, beginning: Beginning) -> None:
        """Publishes the output's full blocks as well: the next turn of a chat begins with the last answer."""
        if beginning.namer is not None:
            num_more = request.num_computed - len(beginning.names) * self._block_size
            more = [*beginning.tail, *request.output[beginning.num_output :]][: max(num_more, 0)]
            beginning.names += beginning.namer.block_hashes_of(more)
            self.computed(request, beginning)

    def spoilt(self, beginning: Beginning) -> None:
        """Publishes the prompt's blocks no longer, since its KV may be wrong."""
        self._engine.forget_hashes(beginning.names)
        beginning.names.clear()
        beginning.namer = None

    def take_counts(self) -> tuple[int, int]:
        """Returns the number of tokens of the prompts that started since the last call, and how many of these had KV
        here."""
        counts, self._num_asked, self._num_found = (self._num_asked, self._num_found), 0, 0
        return counts

    def _usable(self, work: Work, beginning: Beginning) -> Sequence[bytes]:
        """The hashes of the blocks that the request may share. The last token is always computed, because its logits
        are needed."""
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
    """Whether the request may share KV: if log-probabilities of the prompt are wanted, all of it is computed."""
    return work.request.params.prompt_logprobs is None or bool(work.output)
