"""Whether the pool will have room for all that is under way, at the lengths that it is expected to get.

Where best effort is started only if so, whoever has to leave a decode instance finds room for its KV, and nothing is
computed twice. One request of it may run in any case.
"""

from __future__ import annotations

from typing import NamedTuple

from alignedserve.router.cluster_state import ClusterState
from alignedserve.router.request_state import RequestState
from alignedserve.scheduling.forecast import UNKNOWN_OUTPUT, length_beyond
from alignedserve.types import RequestKey

# A request goes on while it waits for its way out.
EVICT_SLACK_BLOCKS = 2
# an answer that ends counts for so much of the mean
_WEIGHT = 0.05


class Need(NamedTuple):
    num_blocks: int
    # of the output that it is for
    num_output: int
    is_rt: bool


class PoolDemand:
    def __init__(self, cluster: ClusterState) -> None:
        self._fleet = cluster
        self._needs: dict[RequestKey, Need] = {}
        self._mean_output: dict[bool, float] = {}
        # that will be needed: of all, and of best effort
        self.num_blocks = 0
        self.num_be_blocks = 0
        # best-effort requests that are under way
        self.num_be = 0

    def __len__(self) -> int:
        return len(self._needs)

    def add(self, state: RequestState) -> None:
        """It is under way, or has become longer than expected. Safe to repeat."""
        self.discard(state)
        num_output = self.expected_output(state)
        need = Need(self.blocks_for(state, num_output), num_output, state.is_rt)
        self._needs[state.key] = need
        self._count(need, 1)

    def discard(self, state: RequestState) -> None:
        """Safe to repeat."""
        if need := self._needs.pop(state.key, None):
            self._count(need, -1)

    def is_exceeded(self, state: RequestState) -> bool:
        need = self._needs.get(state.key)
        return need is not None and len(state.output) >= need.num_output

    def learn_output_len(self, state: RequestState) -> None:
        """By itself: others of its class may be as long."""
        mean = self._mean_output.setdefault(state.is_rt, float(len(state.output)))
        self._mean_output[state.is_rt] = mean + _WEIGHT * (len(state.output) - mean)

    def has_room_for(self, state: RequestState, be_share: float, share: float) -> bool:
        """See `scheduling.island.Island`."""
        pool = self._fleet.pool
        if state.key in self._needs or not self.num_be or pool is None:
            return True
        size, needed = pool.hello.limits.num_blocks, self.blocks_for(state, self.expected_output(state))
        return self.num_be_blocks + needed <= be_share * size or self.num_blocks + needed <= share * size

    def expected_output(self, state: RequestState) -> int:
        """In all."""
        length = state.forecast.length or int(self._mean_output.get(state.is_rt, UNKNOWN_OUTPUT)) or 1
        length = length_beyond(length, len(state.output))
        return min(length, self.max_tokens_of(state) - len(state.request.prompt))

    def blocks_for(self, state: RequestState, num_output: int) -> int:
        """Of the pool, if it were evicted with so much output."""
        num_tokens = min(len(state.request.prompt) + num_output + self._slack, self.max_tokens_of(state))
        return -(-num_tokens // self._block_size)

    def num_tokens_to_evict(self, state: RequestState) -> int:
        """Room for the KV that it has, and what it gets while it waits for that room."""
        return min(state.num_tokens + self._slack, self.max_tokens_of(state))

    def max_tokens_of(self, state: RequestState) -> int:
        """That it can ever have."""
        num_prompt, most = len(state.request.prompt), state.request.params.max_tokens
        longest = max(self._fleet.max_model_len, state.num_tokens)
        return min(num_prompt + most, longest) if most else longest

    @property
    def _block_size(self) -> int:
        return self._fleet.pool.hello.limits.block_size if self._fleet.pool else 1

    @property
    def _slack(self) -> int:
        return EVICT_SLACK_BLOCKS * self._block_size

    def _count(self, need: Need, sign: int) -> None:
        self.num_blocks += sign * need.num_blocks
        if not need.is_rt:
            self.num_be_blocks += sign * need.num_blocks
            self.num_be += sign
