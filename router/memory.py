"""Whether the pool will have room for all that is under way, at the lengths that it is expected to get.

Where best effort is started only if so, whoever has to leave a decode instance finds room for its KV, and nothing is
computed twice. One request of it may run in any case.
"""

from __future__ import annotations

from typing import NamedTuple

from alignedserve.router.entry import Entry
from alignedserve.router.fleet import Fleet
from alignedserve.scheduling.forecast import UNKNOWN_OUTPUT, length_beyond
from alignedserve.types import RequestKey

# A request goes on while it waits for its way out.
EVICT_SLACK_BLOCKS = 2
# an answer that ends counts for so much of the mean
_WEIGHT = 0.05


class Claim(NamedTuple):
    num_blocks: int
    # of the output that it is for
    num_output: int
    is_rt: bool


class Memory:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._claims: dict[RequestKey, Claim] = {}
        self._mean_output: dict[bool, float] = {}
        # that will be needed: of all, and of best effort
        self.num_blocks = 0
        self.num_be_blocks = 0
        # best-effort requests that are under way
        self.num_be = 0

    def __len__(self) -> int:
        return len(self._claims)

    def claim(self, entry: Entry) -> None:
        """It is under way, or has become longer than expected. Safe to repeat."""
        self.drop(entry)
        num_output = self.expected_output(entry)
        claim = Claim(self.blocks_for(entry, num_output), num_output, entry.is_rt)
        self._claims[entry.key] = claim
        self._count(claim, 1)

    def drop(self, entry: Entry) -> None:
        """Safe to repeat."""
        if claim := self._claims.pop(entry.key, None):
            self._count(claim, -1)

    def is_outgrown(self, entry: Entry) -> bool:
        claim = self._claims.get(entry.key)
        return claim is not None and len(entry.output) >= claim.num_output

    def ended(self, entry: Entry) -> None:
        """By itself: others of its class may be as long."""
        mean = self._mean_output.setdefault(entry.is_rt, float(len(entry.output)))
        self._mean_output[entry.is_rt] = mean + _WEIGHT * (len(entry.output) - mean)

    def has_room_for(self, entry: Entry, be_share: float, share: float) -> bool:
        """See `scheduling.island.Island`."""
        pool = self._fleet.pool
        if entry.key in self._claims or not self.num_be or pool is None:
            return True
        size, needed = pool.hello.limits.num_blocks, self.blocks_for(entry, self.expected_output(entry))
        return self.num_be_blocks + needed <= be_share * size or self.num_blocks + needed <= share * size

    def expected_output(self, entry: Entry) -> int:
        """In all."""
        length = entry.forecast.length or int(self._mean_output.get(entry.is_rt, UNKNOWN_OUTPUT)) or 1
        length = length_beyond(length, len(entry.output))
        return min(length, self.most_tokens(entry) - len(entry.request.prompt))

    def blocks_for(self, entry: Entry, num_output: int) -> int:
        """Of the pool, if it were evicted with so much output."""
        num_tokens = min(len(entry.request.prompt) + num_output + self._slack, self.most_tokens(entry))
        return -(-num_tokens // self._block_size)

    def tokens_to_evict(self, entry: Entry) -> int:
        """Room for the KV that it has, and what it gets while it waits for that room."""
        return min(entry.num_tokens + self._slack, self.most_tokens(entry))

    def most_tokens(self, entry: Entry) -> int:
        """That it can ever have."""
        num_prompt, most = len(entry.request.prompt), entry.request.params.max_tokens
        longest = max(self._fleet.max_model_len, entry.num_tokens)
        return min(num_prompt + most, longest) if most else longest

    @property
    def _block_size(self) -> int:
        return self._fleet.pool.hello.limits.block_size if self._fleet.pool else 1

    @property
    def _slack(self) -> int:
        return EVICT_SLACK_BLOCKS * self._block_size

    def _count(self, claim: Claim, sign: int) -> None:
        self.num_blocks += sign * claim.num_blocks
        if not claim.is_rt:
            self.num_be_blocks += sign * claim.num_blocks
            self.num_be += sign
