"""How many pool blocks the running requests will need, at their expected lengths.

Best effort is only started if the pool and the instances that decode have room for that together. One best-effort
request may run in any case.

Requests with a common prefix have its blocks in the pool in common, so these count once (`PrefixCounts`).

A request at a colocated instance needs no pool block until it is evicted, because its prompt was computed there. So
the memory of colocated instances counts as well as the pool's. At separate decode instances the pool's copy of a
running request is a spare, which others may overwrite, and a share of their memory counts. A burst of real time may
cause more victims than the pool has room for. Those are computed again (see `Eviction.reserved`).
"""

from __future__ import annotations

import sys
from typing import NamedTuple

from alignedserve.router.cluster import ClusterState
from alignedserve.router.prefix_counts import PrefixCounts, Run
from alignedserve.router.requests import RequestState
from alignedserve.scheduling.forecast import UNKNOWN_OUTPUT, length_beyond
from alignedserve.types import RequestKey

# The share of the memory of separate decode instances that counts. With none, small pools keep out best effort for
# which there is room: in a scenario of the arena it goes from 198 to 221 tokens/s. With half, requests with unforeseen
# lengths were computed again.
DECODE_SHARE = 0.25
# Blocks by which a victim's KV may grow while it waits for room in the pool: it keeps running.
EVICT_SLACK_BLOCKS = 2
# The weight of a finished answer in the mean length of its class.
_WEIGHT = 0.05


# The set of best effort: see `PrefixCounts`.
_BE = 1


def _sets(is_rt: bool) -> tuple[int, ...]:
    return (0,) if is_rt else (0, _BE)


class Need(NamedTuple):
    # Pool blocks that the request needs if it is evicted: all, and those that it can have in common with no other.
    num_blocks: int
    num_own: int
    is_rt: bool
    # The last run of the others.
    run: Run | None


class PoolDemand:
    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        self._needs: dict[RequestKey, Need] = {}
        # The mean length of finished answers, in tokens, for real time (True) and best effort (False).
        self._mean_output: dict[bool, float] = {}
        # Pool blocks of the requests' prompts that they may have in common.
        self._prefixes = PrefixCounts(num_sets=2)
        # The sums of the others, of all requests and of best effort; and the sum of all blocks of each request.
        self._num_own = 0
        self._num_be_own = 0
        self._num_counted = 0
        # The number of running best-effort requests.
        self.num_be = 0

    def __len__(self) -> int:
        return len(self._needs)

    @property
    def num_blocks(self) -> int:
        """The pool blocks that all requests will need."""
        return self._num_own + self._prefixes.num_blocks[0]

    @property
    def num_be_blocks(self) -> int:
        """The pool blocks that best effort will need."""
        return self._num_be_own + self._prefixes.num_blocks[_BE]

    @property
    def common_share(self) -> float:
        """The share of the pool blocks of all requests that others of them have as well."""
        return 1 - self.num_blocks / self._num_counted if self._num_counted else 0.0

    def add(self, state: RequestState) -> None:
        """Counts a request that has started, or has exceeded its expected length. Safe to repeat."""
        if state.is_embedding:
            return
        self.discard(state)
        num_output = self.expected_output(state)
        num_blocks, hashes = self.blocks_for(state, num_output), self._shared_hashes(state)
        need = Need(
            num_blocks, num_blocks - len(hashes), state.is_rt, self._prefixes.add(hashes, _sets(state.is_rt))
        )
        self._needs[state.key] = need
        state.demanded_output = num_output
        self._count(need, 1)

    def discard(self, state: RequestState) -> None:
        """Safe to repeat."""
        if need := self._needs.pop(state.key, None):
            state.demanded_output = sys.maxsize
            self._prefixes.discard(need.run, _sets(need.is_rt))
            self._count(need, -1)

    def learn_output_len(self, state: RequestState) -> None:
        """Learns from the length of an answer that has ended by itself. It helps to predict others of its class."""
        mean = self._mean_output.setdefault(state.is_rt, float(len(state.output)))
        self._mean_output[state.is_rt] = mean + _WEIGHT * (len(state.output) - mean)

    def has_room_for(self, state: RequestState, be_share: float, share: float) -> bool:
        """See `scheduling.island.Island`."""
        pool = self._cluster.pool
        if state.is_embedding or state.key in self._needs or not self.num_be or pool is None:
            return True
        needed, hashes = self.blocks_for(state, self.expected_output(state)), self._shared_hashes(state)
        pooled = pool.hello.limits.num_blocks
        size = pooled + self._num_blocks_at_decodes(needed)
        num_be = self.num_be_blocks + needed - self._prefixes.num_found(hashes, _BE)
        num_all = self.num_blocks + needed - self._prefixes.num_found(hashes)
        # At separate decode instances the pool alone has room for all best effort, should real time evict it.
        fits_evicted = self._cluster.is_colocated or num_be <= share * pooled
        return num_be <= be_share * size or (num_all <= share * size and fits_evicted)

    def _num_blocks_at_decodes(self, needed: int) -> int:
        """Returns how many pool blocks of KV fit into the memory of the instances that decode. Assumes the mean length
        of the running requests and one more of `needed` blocks."""
        length = (self._num_counted + needed) // (len(self._needs) + 1) * self._block_size
        limits = [view.hello.limits for view in self._cluster.decodes]
        num_tokens = sum(each.num_tokens_of(length) for each in limits)
        share = 1.0 if self._cluster.is_colocated else DECODE_SHARE
        return int(share * num_tokens) // self._block_size

    def expected_output(self, state: RequestState) -> int:
        """Returns how many output tokens the request is expected to have at its end."""
        if state.is_embedding:
            return 0
        length = state.forecast.length or int(self._mean_output.get(state.is_rt, UNKNOWN_OUTPUT)) or 1
        length = length_beyond(length, len(state.output))
        return min(length, self.max_tokens_of(state) - len(state.request.prompt))

    def blocks_for(self, state: RequestState, num_output: int) -> int:
        """Returns how many pool blocks the request would need if it were evicted with `num_output` output tokens."""
        num_tokens = min(len(state.request.prompt) + num_output + self._slack, self.max_tokens_of(state))
        return -(-num_tokens // self._block_size)

    def num_tokens_to_evict(self, state: RequestState) -> int:
        """Returns how many tokens need room: the request's own, and those that it generates while it waits."""
        return min(state.num_tokens + self._slack, self.max_tokens_of(state))

    def max_tokens_of(self, state: RequestState) -> int:
        """Returns the most tokens, of prompt and output, that the request can have."""
        num_prompt, most = len(state.request.prompt), state.request.params.max_tokens
        longest = max(self._cluster.max_model_len, state.num_tokens)
        return min(num_prompt + most, longest) if most else longest

    @property
    def _block_size(self) -> int:
        return self._cluster.pool.hello.limits.block_size if self._cluster.pool else 1

    @property
    def _slack(self) -> int:
        return EVICT_SLACK_BLOCKS * self._block_size

    def _shared_hashes(self, state: RequestState) -> list[bytes]:
        """Returns the hashes of the blocks that the request may have in common with others: never its last token's."""
        if not (state.may_share and self._cluster.shares_all_blocks):
            return []
        num_shared = (len(state.request.prompt) - 1) // self._block_size
        return state.block_hashes(self._block_size)[:num_shared]

    def _count(self, need: Need, sign: int) -> None:
        self._num_counted += sign * need.num_blocks
        self._num_own += sign * need.num_own
        if not need.is_rt:
            self._num_be_own += sign * need.num_own
            self.num_be += sign
