"""KV that requests which begin alike have in common, of those that the engine runs on its own: of prompts and outputs.

What is shared is blocks, by their names (`blocks.py`): a prompt's have them as they are filled, an output's at its end.
"""

from __future__ import annotations

from dataclasses import dataclass

from alignedserve.engine.blocks import BlockManager
from alignedserve.engine.request import Request
from alignedserve.prefixes import Namer
from alignedserve.types import BlockId, RequestId


@dataclass(slots=True)
class Naming:
    """How far a request's blocks have been named."""

    namer: Namer
    # of its first blocks
    names: list[bytes]
    # blocks that others may share
    num_named: int = 0


class PrefixCache:
    def __init__(self, blocks: BlockManager, block_size: int, is_enabled: bool) -> None:
        self._blocks = blocks
        self._block_size = block_size
        self._is_enabled = is_enabled
        self._namings: dict[RequestId, Naming] = {}

    def add(self, request: Request) -> None:
        if not self._is_enabled:
            return
        namer = Namer(self._block_size)
        names = namer.names_of(request.prompt.tolist())
        self._namings[request.request_id] = Naming(namer, names)
        if request.params.prompt_logprobs is None:
            # of the last token the output is wanted: that is computed in any case
            request.names = names[: (request.num_prompt - 1) // self._block_size]

    def num_found(self, request: Request) -> int:
        """Tokens of a request that waits whose KV is there now."""
        return self._blocks.num_known(request.names) * self._block_size

    def share(self, request: Request) -> list[BlockId]:
        """The request, which holds no blocks yet, has those from here on."""
        count = self._blocks.share(request.request_id, request.names)
        request.num_found = request.num_computed = count * self._block_size
        if count:
            self._namings[request.request_id].num_named = count
        return self._blocks.held(request.request_id)

    def computed(self, request: Request) -> None:
        """Blocks of it are full, and others may share them."""
        naming = self._namings.get(request.request_id)
        if naming is None:
            return
        first, end = naming.num_named, request.num_computed // self._block_size
        if end > len(naming.names):
            start = len(naming.names) * self._block_size
            naming.names += naming.namer.names_of(request.tokens(start, end * self._block_size).tolist())
        self._blocks.name(request.request_id, first, naming.names[first:end])
        naming.num_named = max(first, end)

    def ended(self, request: Request) -> None:
        """It gives its blocks back next; those with names can be had by others."""
        self.computed(request)
        self._namings.pop(request.request_id, None)

    def evicted(self, request: Request) -> None:
        """It comes back with other blocks."""
        if naming := self._namings.get(request.request_id):
            naming.num_named = 0

    def spoilt(self, request: Request) -> None:
        """Something is wrong with its KV, perhaps, wherever that was."""
        if naming := self._namings.pop(request.request_id, None):
            self._blocks.forget(naming.names)

    def reset(self) -> None:
        self._namings.clear()
