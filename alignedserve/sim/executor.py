"""A simulated engine: it computes nothing, predicts iteration times, and samples by `model.py`.

Instead of KV, a block holds a record of which KV it would be. A request that joins without all of its own KV is an
error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec
import numpy as np

from alignedserve.engine.outputs import TokenOutput
from alignedserve.engine.request import NewRequest, Request, Status, Vocabulary, Work
from alignedserve.instance.memory import BlockManager
from alignedserve.instance.requests import key_of
from alignedserve.kv.end_copies import Checkpoint, Cut, EndCopy, Renew, Restore
from alignedserve.kv.held import NO_BLOCK
from alignedserve.kv.span import KvSpan
from alignedserve.protocol.messages import InstanceLimits
from alignedserve.sim import model
from alignedserve.sim.block_contents import BlockContents
from alignedserve.sim.grammars import SimGrammars
from alignedserve.sim.kv_model import KvModel, TokenChain
from alignedserve.sim.segment import Content
from alignedserve.timing.cost import CopyChannel, CostModel
from alignedserve.types import BlockId, RequestId, RequestKey

_VOCABULARY = Vocabulary(model.VOCABULARY, frozenset())


@dataclass(frozen=True)
class SimFormat:
    block_size: int
    # Bytes of a block of one layer group.
    block_bytes: int
    # The same, in the pool.
    pool_block_bytes: int


class SimMemory(BlockManager):
    """Forgets what a block held when another owner takes it."""

    def __init__(self, num_blocks: int, span: KvSpan, contents: BlockContents) -> None:
        super().__init__(num_blocks, span)
        self._contents = contents

    def _take(self, count: int) -> list[BlockId]:
        blocks = super()._take(count)
        for block in blocks:
            self._contents.clear(block)
        return blocks


class SimIteration(msgspec.Struct):
    requests: list[Request]
    # Seconds of virtual time that the iteration takes.
    seconds: float


class SimEngine:
    """The contracts of the methods are those of `Engine`."""

    # Whether blocks record which KV they would hold.
    has_contents = True

    def __init__(
        self,
        limits: InstanceLimits,
        cost: CostModel,
        computed: Counter[RequestKey],
        kv: KvModel | None = None,
        seconds: Callable[[float, bool], float] = lambda model_s, has_chunks: model_s,
    ) -> None:
        """`computed`: tokens computed for each request, counted over all instances. `kv`: which KV is right. `seconds`
        returns an iteration's duration from that of the cost model, and from whether it has parts of prompts."""
        self.limits = limits
        self.max_model_len = limits.max_model_len
        self.vocabulary = _VOCABULARY
        self.span = replace(limits.span, max_step=0)
        self.format = SimFormat(
            limits.block_size,
            limits.block_size * cost.kv_bytes_per_token // self.span.num_groups,
            int(limits.block_size * cost.pool_bytes_per_token / self.span.num_groups),
        )
        self.grammars = SimGrammars()
        self.contents = self._make_contents()
        # The blocks of all workers of this instance, one after the other.
        self.memory = self._make_memory()
        # Seconds of the copies before the next iteration for blocks that are shared from both ends.
        self._copies_s = 0.0
        self._cost = cost
        self._seconds = seconds
        self._computed = computed
        self._kv = kv or KvModel()
        self._chains: dict[RequestId, TokenChain] = {}
        self._requests: dict[RequestId, Request] = {}
        # The right contents of a request's whole blocks, by group and column, when they were last checked.
        self._right: dict[RequestId, dict[tuple[int, int], Content]] = {}
        # For requests with KV that is not right, the lowest `Content.flaw`.
        self._flaws: dict[RequestId, int] = {}

    def _make_contents(self) -> BlockContents:
        return BlockContents(self.limits.block_size)

    def _make_memory(self) -> BlockManager:
        return SimMemory(self.limits.num_blocks, self.span, self.contents)

    # ---- requests ---------------------------------------------------------------------------------------------------

    def adopt(self, new: NewRequest) -> Request:
        request_id = new.request_id
        new.check(self.limits.can_keep_inputs)
        self._know_tokens(new)
        # No token of the prompt is read; only its length counts.
        prompt = np.empty(len(new.prompt), dtype=np.int32)
        request = new.begin(prompt, frozenset(), self.max_model_len)
        if request.matcher is None and new.params.structured_outputs is not None:
            request.matcher = self.grammars.matcher(new.params.structured_outputs, owner="")
        request.max_output_len = min(request.max_output_len, model.own_output_len(new.seed))
        self._requests[request_id] = request
        self.contents.lay_out(key_of(request_id), request.layout)
        return request

    def _know_tokens(self, new: NewRequest) -> None:
        key = key_of(new.request_id)
        chain = self._chains[new.request_id] = self._kv.chain(key, new.prompt, new.seed, new.adapter)
        for k, token in enumerate(new.output):
            if token != chain.token(k):
                raise RuntimeError(
                    f"request {key} comes with {token} as its output token {k}, not {chain.token(k)}"
                )

    def join(self, request: Request) -> None:
        self._check_content(request)
        request.status = Status.RUNNING

    def part(self, request: Request) -> None:
        request.status = Status.HELD

    def release(self, request: Request) -> None:
        self._right.pop(request.request_id, None)
        self._flaws.pop(request.request_id, None)
        self._chains.pop(request.request_id, None)
        self.contents.forget(key_of(request.request_id))
        request.status = Status.FINISHED
        del self._requests[request.request_id]

    # ---- blocks that two requests fill from both ends ----------------------------------------------------------------

    def copy_ends(self, copies: Sequence[tuple[Request, EndCopy]]) -> Counter[str]:
        copied = Counter[str]()
        for request, copy in copies:
            match copy:
                case Checkpoint(key, index, block, first, end):
                    digest = partial(self._digest, request.request_id)
                    self.contents.save(key, block, index, first, end, digest)
                    copied["checkpoint"] += self._copied(end - first, self._cost.channels.save)
                case Renew(key, _, old, new):
                    if old != NO_BLOCK:
                        self.contents.copy(key, old, new)
                case Restore(key, index, block, first, end):
                    self.contents.restore(key, block, index, first, end)
                    copied["restore"] += self._copied(end - first, self._cost.channels.fetch)
                case Cut(key, num_tokens):
                    request.num_computed = num_tokens
                    self.contents.drop(key)
        return copied

    def _copied(self, num_tokens: int, channel: CopyChannel) -> int:
        num_bytes = num_tokens * self._cost.kv_bytes_per_token
        self._copies_s += channel.seconds(num_bytes)
        return num_bytes

    # ---- checks of block contents ------------------------------------------------------------------------------------

    def _check_content(self, request: Request) -> None:
        key, size = key_of(request.request_id), self._size_of(request)
        known, right = self._right.get(request.request_id, {}), dict[tuple[int, int], Content]()
        end = -(-request.num_computed // size)
        for group in range(self.span.num_groups):
            blocks = request.held.groups[group]
            for column in range(self._first_seen(request, group), end):
                held = self.contents.get(key, blocks[column])
                if held is None or held is not known.get((group, column)):
                    held = self._checked(request, group, column, held)
                if held.num_tokens == size:
                    right[group, column] = held
        self._right[request.request_id] = right

    def _first_seen(self, request: Request, group: int) -> int:
        """Returns the first column to which the request's next token attends in layers of this group. Derived from the
        window, independently of which columns count as passed."""
        if group < self.span.num_full_groups or not self.memory.span.window:
            return 0
        return max(request.num_computed + 1 - self.span.window, 0) // self._size_of(request)

    def _checked(self, request: Request, group: int, column: int, held: Content | None) -> Content:
        """Raises RuntimeError unless the block holds what the request needs there."""
        key, size = key_of(request.request_id), self._size_of(request)
        least = min(size, request.num_computed - column * size)
        is_its_own = column < request.held.num_shared or (held and held.key == key)
        is_there = held is not None and (held.group, held.place) == (group, column)
        # A state can't be read without the tokens that have changed it since.
        is_state = self.span.has_state and group >= self.span.num_full_groups
        is_past = is_state and held is not None and held.num_tokens > least
        if held is None or not is_its_own or not is_there or held.num_tokens < least or is_past:
            raise RuntimeError(
                f"request {key} runs with {least} tokens in its block {column} of group {group}, which holds {held}"
            )
        self._check_digest(request, held)
        return held

    def _check_digest(self, request: Request, held: Content) -> None:
        """Raises RuntimeError unless the block holds KV of the request's own tokens, from a prefix of its own."""
        key, num_tokens = key_of(request.request_id), held.place * self._size_of(request) + held.num_tokens
        if held.layout is not request.layout:
            raise RuntimeError(f"request {key} reads its block {held.place} in another layout: {held}")
        if held.digest != self._chains[request.request_id].hash_of(num_tokens):
            raise RuntimeError(f"request {key} has KV of other tokens in its block {held.place}: {held}")
        if held.flaw:
            self._kv.check_flaw(key, held.flaw)
            self._flaws[request.request_id] = min(held.flaw, self._flaws.get(request.request_id, held.flaw))

    def _size_of(self, request: Request) -> int:
        """Returns how many of the request's tokens fit into a block."""
        return request.layout.tokens_per_block(self.format.block_size)

    # ---- iterations -------------------------------------------------------------------------------------------------

    def launch(self, work: Work) -> SimIteration:
        chunks, lengths, requests, num_restored = [], [], [], 0
        computed, has_contents = self._computed, self.has_contents
        for request, count in work:
            first, num_output = request.num_computed, len(request.output)
            end = first + count
            is_due = end == request.num_prompt + num_output
            if is_due:
                requests.append(request)
            if is_due and count == 1 and num_output:
                lengths.append(end - self._num_saved(request) if self._cost.shared_saving else end)
            else:
                chunks.append((first, count))
            if not request.layout.holds_kv:
                num_restored += first
            if has_contents:
                self._compute(request, end)
            request.num_computed = end
            computed[key_of(request.request_id)] += count
        computing_s = self._seconds(self._cost.iteration(chunks, lengths, num_restored), bool(chunks))
        copies_s, self._copies_s = self._copies_s, 0.0
        return SimIteration(requests, copies_s + computing_s)

    def _num_saved(self, request: Request) -> int:
        num_columns = self.memory.num_read_by_others(request.held)
        return int(self._cost.shared_saving * self.format.block_size * num_columns)

    def finish(self, iteration: SimIteration) -> list[TokenOutput]:
        return [*map(self._sample, iteration.requests)]

    def _sample(self, request: Request) -> TokenOutput:
        if request.pooling is not None:
            self.part(request)
            return TokenOutput(request.request_id, None, "stop", embedding=self._embedding(request))
        output, reason = request.output, None
        num_before = len(output)
        token = model.sample(request.seed, num_before)
        output.append(token)
        if num_before + 1 >= request.max_output_len:
            reason = "stop" if num_before + 1 >= model.own_output_len(request.seed) else "length"
            self.part(request)
        return TokenOutput(request.request_id, token, reason)

    def _compute(self, request: Request, end: int) -> None:
        """Computes the request's tokens up to `end`: checks those before, and fills blocks."""
        key, size, first = key_of(request.request_id), self._size_of(request), request.num_computed
        if self.memory.has_lent or self.memory.span.window or self.span.num_groups > 1:
            self._check_content(request)
        elif first:
            held = self.contents.get(key, request.held.blocks[(first - 1) // size])
            if held is None:
                raise RuntimeError(f"request {key} goes on after {first} tokens, the last of which are gone")
            self._check_digest(request, held)
        for column in range(first // size, -(-end // size)):
            until = min(end, (column + 1) * size)
            digest = self._digest(request.request_id, until)
            content = Content(
                key,
                column,
                until - column * size,
                digest,
                flaw=self._flaws.get(request.request_id, 0),
                layout=request.layout,
            )
            for group in range(self.span.num_groups):
                block = request.held.groups[group][column]
                self.contents.write(block, content._replace(group=group))

    def _digest(self, request_id: RequestId, num_tokens: int) -> int:
        return self._chains[request_id].hash_of(num_tokens)

    def _embedding(self, request: Request) -> bytes:
        return self._chains[request.request_id].embedding

    # ---- checks -----------------------------------------------------------------------------------------------------

    def confirm(self) -> None:
        """Does nothing: a simulated instance has one rank, which ends as a whole."""

    def check_idle(self) -> None:
        """Raises RuntimeError if anything is left of a request."""
        if self._requests:
            raise RuntimeError(f"idle, but requests {sorted(self._requests)} are left")
