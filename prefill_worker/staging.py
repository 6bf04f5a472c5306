"""KV on a prefill instance that decode instances pull. A candidate's KV is copied here from the pool. An RT prompt's KV
was just computed here, and is copied to the pool meanwhile.

    a candidate: loading (its KV is being copied from the pool) -> staged -> gone, when it is pulled or unstaged
    a prompt: held -> let go, when it was pulled, or the router has sent Unstage, or the request is dropped

A request that is dropped during a pull holds its blocks until the pull has ended. A new order for the same request
waits for that. The blocks of both kinds share a limit (`stages.py`), so the longest prompt always has room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from alignedserve.instance.copies import RunningCopies, blocks_with, pairs_of
from alignedserve.instance.executor import Transfers
from alignedserve.prefill_worker.schedule import PrefillSchedule
from alignedserve.protocol.messages import Failed, Gone, Work
from alignedserve.transport.completions import Outcome
from alignedserve.types import BlockId, RequestKey


class StagingListener(Protocol):
    """The worker, to which staging says what has happened."""

    def staged(self, key: RequestKey) -> None: ...

    def let_go(self, key: RequestKey) -> None:
        """A prompt is no longer held."""

    def gone(self, last_message: Failed | Gone) -> None: ...


@dataclass(eq=False)
class Staged:
    blocks: Sequence[BlockId]
    # Whether it is a prompt, which has these blocks itself, and not a candidate.
    is_prompt: bool
    is_staged: bool
    is_leaving: bool = False
    # The message to send and the call to make when it is gone.
    last_message: Failed | Gone | None = None
    then: Callable[[], None] | None = None


class Staging:
    def __init__(
        self,
        schedule: PrefillSchedule,
        transfers: Transfers,
        copies: RunningCopies,
        listener: StagingListener,
    ) -> None:
        self._schedule = schedule
        self._transfers = transfers
        self._copies = copies
        self._listener = listener
        self._requests: dict[RequestKey, Staged] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._requests

    def when_gone(self, key: RequestKey, order: Callable[[], None]) -> None:
        """Carries out an order for a request that has left in the router's view, but may still hold blocks: immediately
        if it holds none, or when they are free."""
        staged = self._requests.get(key)
        if staged and (staged.is_prompt or staged.is_leaving):
            staged.then = order
        else:
            order()

    def start(self, work: Work) -> None:
        """Starts loading a candidate, which has its blocks."""
        key, num_cached, memory = work.request.key, work.num_cached, self._schedule.memory
        held = self._schedule.stages.started[key]
        blocks = blocks_with(memory, held, num_cached)
        self._requests[key] = Staged(blocks, is_prompt=False, is_staged=False)
        end, num_passed = memory.span.num_columns(num_cached), memory.span.num_passed(num_cached)
        pairs = pairs_of(memory, held, work.blocks, 0, end, num_passed)
        self._copies.load(key, pairs, self._loaded, work.deadlines.is_rt)

    def hold(self, key: RequestKey, blocks: Sequence[BlockId]) -> bool:
        """Lets decode instances pull the prompt's KV. Returns False and does nothing if too many blocks are already
        held."""
        if not self._schedule.hold(key):
            return False
        self._requests[key] = Staged(blocks, is_prompt=True, is_staged=True)
        self._transfers.stage(key, blocks, self._left_buffer)
        return True

    def drop(self, key: RequestKey, last_message: Gone | None = None) -> bool:
        """Lets no instance pull the request any more, and forgets the order that waits for it. Returns False and
        changes nothing if it has no blocks here. Safe to repeat."""
        staged = self._requests.get(key)
        if staged is None:
            return False
        staged.is_leaving, staged.then = True, None
        staged.last_message = last_message or staged.last_message
        if staged.is_staged:
            self._transfers.unstage(key)
        else:
            self._schedule.stages.unstage(key)
            self._transfers.abandon(key)
        return True

    def _loaded(self, outcome: Outcome) -> None:
        (key,) = outcome.keys
        staged = self._requests[key]
        if outcome.error is not None and not staged.is_leaving:
            self._schedule.stages.unstage(key)
            staged.last_message = Failed(key, "load", outcome.error, outcome.wrong_block)
        if self._schedule.stages.staged(key):
            staged.is_staged = True
            self._transfers.stage(key, staged.blocks, self._left_buffer)
            self._listener.staged(key)
        else:
            self._leave(key)

    def _left_buffer(self, outcome: Outcome) -> None:
        """Handles the end of staging: the request was pulled or withdrawn."""
        (key,) = outcome.keys
        if not self._requests[key].is_prompt:
            self._schedule.stages.unstage(key)
        self._leave(key)

    def _leave(self, key: RequestKey) -> None:
        staged = self._requests.pop(key)
        if staged.is_prompt:
            self._schedule.prompts.let_go(key)
            self._listener.let_go(key)
        if staged.last_message:
            self._listener.gone(staged.last_message)
        if staged.then:
            staged.then()
