"""What an instance's state machine stands on: an executor, which computes and holds blocks, and transfers of KV.

Live these are the engine (`engine/engine.py`) and `live_transfers.py`; in simulation, a cost model and channels
(`sim/executor.py`, `sim/transfers.py`). The state machines of both kinds of instances can't tell the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from alignedserve.engine.outputs import TokenOutput
from alignedserve.engine.request import Request, Work
from alignedserve.engine.validate import Vocabulary
from alignedserve.protocol.kv_span import KvSpan
from alignedserve.sampling_params import SamplingParams
from alignedserve.structured_outputs import StructuredOutputsParams
from alignedserve.text.grammar import Matcher
from alignedserve.transport.completions import Completions, Done
from alignedserve.transport.runs import Pairs, TransferSpec
from alignedserve.types import BlockId, InstanceId, RequestId, RequestKey


class Format(Protocol):
    """The part of `kv_format.BlockFormat` which counts columns and bytes."""

    @property
    def block_size(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    def num_columns(self, num_tokens: int, keeps_inputs: bool = False) -> int: ...


class Limits(Protocol):
    @property
    def max_num_seqs(self) -> int: ...

    @property
    def max_num_batched_tokens(self) -> int: ...

    @property
    def max_prefill_chunk(self) -> int: ...

    @property
    def max_restored_blocks(self) -> int: ...


class Grammars(Protocol):
    def matcher(self, structure: StructuredOutputsParams) -> Matcher: ...


class Iteration(Protocol):
    """An iteration that was launched. No request enters or leaves the batch until it is finished."""

    @property
    def requests(self) -> list[Request]:
        """The requests which get a token or their embedding, or an error instead."""


class Executor(Protocol):
    """See `Engine` for what each method promises."""

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

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_free_blocks(self) -> int: ...

    def confirm(self) -> None: ...

    def keep_window(self, max_step: int) -> None: ...

    def adopt(
        self,
        request_id: RequestId,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        seed: int,
        output: Sequence[int] = (),
        num_computed: int = 0,
        matcher: Matcher | None = None,
        is_reversed: bool = False,
        num_lent: int = 0,
        keeps_inputs: bool = False,
        pooling: str | None = None,
        adapter: str = "",
    ) -> Request | None: ...

    def join(self, request: Request) -> None: ...

    def free_passed(self, request: Request) -> None: ...

    def part(self, request: Request) -> None: ...

    def release(self, request: Request) -> None: ...

    def blocks_of(self, request: Request, first: int = 0, end: int | None = None) -> list[BlockId]: ...

    def lease(self, owner: RequestId, num_blocks: int) -> list[BlockId]: ...

    def give_back(self, owner: RequestId) -> None: ...

    def num_known(self, block_hashes: Sequence[bytes]) -> int: ...

    def share(self, request_id: RequestId, block_hashes: Sequence[bytes]) -> int: ...

    def publish_blocks(self, request: Request, first: int, block_hashes: Sequence[bytes]) -> None: ...

    def forget_hashes(self, block_hashes: Sequence[bytes]) -> None: ...

    def make_checkpoints(self, num_parts: int) -> None: ...

    def lend(self, borrower: Request, lender: Request, index: int) -> None: ...

    def allocate_up_to(self, request: Request, num_columns: int) -> None: ...

    def checkpoint(self, lender: Request, index: int, first: int, end: int) -> int: ...

    def give_up(self, lender: Request, index: int) -> None: ...

    def renew(self, lender: Request, index: int) -> None: ...

    def restore(self, lender: Request, index: int, first: int, end: int) -> int: ...

    def cut(self, request: Request, num_tokens: int) -> None: ...

    def launch(self, work: Work) -> Iteration: ...

    def finish(self, iteration: Any) -> list[TokenOutput]: ...


class Transfers(Protocol):
    """Copies of KV: between this instance's blocks and the pool's, and between instances.

    Each copy that was started ends with one outcome, which `completions` hands to its `done`; until then its blocks
    must not be freed.

    A pair is a block of this instance and one of the pool. In a column of the pool the blocks of all groups of layers
    follow each other: that of group g in column p is number p * num_groups + g.
    """

    completions: Completions

    @property
    def staging_share(self) -> float:
        """The share of a prefill instance's blocks for KV that decode instances pull from it."""

    def use_pool(self, pool: Any) -> None:
        """Uses this memory as the pool's from here on."""

    def leave_pool(self) -> None:
        """Releases the pool's memory. Safe to repeat."""

    def load(self, key: RequestKey, pairs: Pairs, done: Done, is_urgent: bool = False) -> None:
        """Copies blocks from the pool."""

    def save(
        self, key: RequestKey, pairs: Pairs, num_empty: int, done: Done, is_urgent: bool = False
    ) -> None:
        """Copies blocks to the pool, after all that was computed before this call. All are full but those of the last
        column, whose last `num_empty` slots hold nothing that counts. The last pair is of that column."""

    def abandon(self, key: RequestKey) -> None:
        """Stops the request's copies from and to the pool; each still ends with an outcome. Safe to repeat."""

    def stage(self, key: RequestKey, blocks: Sequence[BlockId], done: Done) -> None:
        """Lets decode instances pull these blocks. `done` is called when one has, and with an error after
        `unstage`."""

    def unstage(self, key: RequestKey) -> None:
        """Withdraws the request's staged blocks; during a pull, only if that fails. Safe to repeat."""

    def pull(self, source: InstanceId, address: str, specs: Sequence[TransferSpec], done: Done) -> None:
        """Pulls what another instance has staged: all requests succeed, or none. The outcome is denied if one of them
        is not staged there."""

    def cut(self) -> None:
        """Ends this instance's pulls, and other instances' pulls from it. A later pull connects anew."""

    def close(self) -> None:
        """Ends all threads. Safe to repeat."""
