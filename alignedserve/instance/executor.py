"""The two interfaces below an instance's state machine: an executor, which computes, and transfers of KV.

Live, these are the engine (`engine/engine.py`) and `live_transfers.py`. In simulation, they are a cost model and
channels (`sim/executor.py`, `sim/transfers.py`). The state machines are the same in both cases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from alignedserve.engine.outputs import TokenOutput
from alignedserve.engine.request import NewRequest, Request, Vocabulary, Work
from alignedserve.kv.end_copies import EndCopy
from alignedserve.kv.span import KvSpan
from alignedserve.structured_outputs import StructuredOutputsParams
from alignedserve.text.grammar import Matcher
from alignedserve.transport.completions import Completions, Done
from alignedserve.transport.runs import Pairs, TransferSpec
from alignedserve.types import BlockId, InstanceId, RequestKey


class Format(Protocol):
    """The part of `kv/format.BlockFormat` that counts bytes."""

    @property
    def block_size(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...


class Limits(Protocol):
    @property
    def num_blocks(self) -> int: ...

    @property
    def max_num_seqs(self) -> int: ...

    @property
    def max_num_batched_tokens(self) -> int: ...

    @property
    def max_prefill_chunk(self) -> int: ...

    @property
    def max_restored_blocks(self) -> int: ...


class Grammars(Protocol):
    def matcher(self, structure: StructuredOutputsParams, owner: str) -> Matcher: ...


class Iteration(Protocol):
    """A launched iteration. Until it is finished, no request enters or leaves the batch."""

    @property
    def requests(self) -> list[Request]:
        """The requests that get a token, an embedding or an error."""


class Executor(Protocol):
    """See `Engine` for the contract of each method."""

    @property
    def format(self) -> Format: ...

    @property
    def limits(self) -> Limits: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def grammars(self) -> Grammars: ...

    @property
    def span(self) -> KvSpan: ...

    def confirm(self) -> None: ...

    def adopt(self, new: NewRequest) -> Request: ...

    def join(self, request: Request) -> None: ...

    def part(self, request: Request) -> None: ...

    def release(self, request: Request) -> None: ...

    def copy_ends(self, copies: Sequence[tuple[Request, EndCopy]]) -> Counter[str]: ...

    def launch(self, work: Work) -> Iteration: ...

    def finish(self, iteration: Any) -> list[TokenOutput]: ...


class Transfers(Protocol):
    """Copies of KV between this instance's blocks and the pool's, and between instances.

    Each started copy ends with one outcome, which `completions` passes to its `done`. Until then its blocks must not be
    freed.

    A pair is one of this instance's blocks and one of the pool's. In the pool, the blocks of a column are consecutive:
    the block of group g in column p has number p * num_groups + g.
    """

    completions: Completions

    @property
    def staging_share(self) -> float:
        """The share of a prefill instance's blocks for KV that decode instances pull."""

    @property
    def checks_some_blocks(self) -> bool:
        """Whether loads check some of the pool's blocks, and not all of them."""

    def use_pool(self, pool: Any, checksums: Any = None) -> None:
        """Uses this memory as the pool's from now on, with these checksums of its blocks."""

    def leave_pool(self) -> None:
        """Releases the pool's memory. Safe to repeat."""

    def load(self, key: RequestKey, pairs: Pairs, done: Done, is_urgent: bool = False) -> None:
        """Copies blocks from the pool."""

    def save(
        self, key: RequestKey, pairs: Pairs, num_empty: int, done: Done, is_urgent: bool = False
    ) -> None:
        """Copies blocks to the pool, after all computation that was queued before this call. All blocks are full,
        except that the last `num_empty` slots of the last column hold nothing. The last pair belongs to that column."""

    def abandon(self, key: RequestKey) -> None:
        """Stops the request's copies from and to the pool. Each still ends with an outcome. Safe to repeat."""

    def stage(self, key: RequestKey, blocks: Sequence[BlockId], done: Done) -> None:
        """Lets decode instances pull these blocks. `done` is called after a pull, and with an error after `unstage`."""

    def unstage(self, key: RequestKey) -> None:
        """Withdraws the request's staged blocks; during a pull, only if it fails. Safe to repeat."""

    def pull(self, source: InstanceId, address: str, specs: Sequence[TransferSpec], done: Done) -> None:
        """Pulls requests that another instance has staged: all of them or none. The outcome is denied if one is not
        staged there."""

    def cut(self) -> None:
        """Ends this instance's pulls, and other instances' pulls from it. A later pull reconnects."""

    def close(self) -> None:
        """Ends all threads. Safe to repeat."""
