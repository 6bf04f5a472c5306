"""The candidates of decode instances on the instance from which they are pulled. Pure; `staging.py` moves their
KV. Their states are drawn in `scheduled_request.py`.

They have a share of the blocks. Within it they precede prompts, because decode instances wait for them. Prompts that
are held for decode instances (`staging.py`) count in it. Blocks under a copy are held until the copy is reported.
"""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.instance.memory import BlockManager
from alignedserve.prefill_worker.prompt_table import PromptTable
from alignedserve.prefill_worker.scheduled_request import PromptState, ScheduledRequest
from alignedserve.prefill_worker.table import PrefillTable
from alignedserve.protocol.messages import Work
from alignedserve.scheduling.policy import PrefillPart
from alignedserve.types import RequestKey


class Stages(PrefillTable):
    def __init__(
        self, num_blocks_at_most: int, policy: PrefillPart, memory: BlockManager, prompts: PromptTable
    ) -> None:
        super().__init__(memory)
        self._prompts = prompts
        self._num_blocks_at_most = num_blocks_at_most
        self._policy = policy

    # ---- from state to state ----------------------------------------------------------------------------------------

    def add(self, work: Work) -> None:
        needed, most = self._needed(work), self._num_blocks_at_most
        if needed > most:
            raise ValueError(
                f"request {work.request.key}: {needed} blocks to stage, at most {most} are for that"
            )
        self._waiting[work.request.key] = ScheduledRequest(work)

    def start(self) -> list[Work]:
        """Starts the candidates for which there are blocks, and returns their work."""
        works = []
        for request in self._in_order():
            num_blocks = self._needed(request.work)
            if num_blocks > self._memory.num_free or not self.has_share(num_blocks):
                break
            self._started[request.key] = self._waiting.pop(request.key)
            self._reserve(request, request.work.num_cached, request.work.num_cached)
            request.enter(PromptState.STAGING)
            works.append(request.work)
        return works

    def staged(self, key: RequestKey) -> bool:
        """Reports that the candidate's KV has arrived. Returns False if it was aborted or unstaged meanwhile and is
        gone."""
        request = self._started[key]
        if request.state is PromptState.ABORTED:
            self._leave(key)
            return False
        request.enter(PromptState.STAGED)
        return True

    def unstage(self, key: RequestKey) -> bool:
        """Frees the candidate's blocks. Returns True if they are held until a running copy is reported. Ignores unknown
        requests."""
        self._waiting.pop(key, None)
        request = self._started.get(key)
        if request and request.state is PromptState.STAGED:
            self._leave(key)
        elif request:
            request.enter(PromptState.ABORTED)
        return key in self._started

    # ---- which is next ----------------------------------------------------------------------------------------------

    def short_of_blocks(self) -> ScheduledRequest | None:
        """Returns the next candidate if it waits for free blocks, and not for other candidates to be unstaged. Blocks
        that become free are then reserved for it, not for new prompts."""
        request = next(iter(self._in_order()), None)
        return request if request and self.has_share(self._needed(request.work)) else None

    def _needed(self, work: Work) -> int:
        return self.needed(work.num_cached, work.num_cached)

    def _in_order(self) -> Sequence[ScheduledRequest]:
        return self._policy.in_staging_order([*self._waiting.values()])

    def has_share(self, num_blocks: int) -> bool:
        """Whether `num_blocks` more blocks may be withheld from prompts."""
        num_taken = self.num_blocks + self._prompts.num_held_blocks
        return num_taken + num_blocks <= self._num_blocks_at_most
