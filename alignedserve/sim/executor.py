"""A simulated engine: it computes nothing, but holds blocks as the real one does, predicts iteration times, and samples
by `model.py`.

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

from alignedserve.engine.blocks import NO_BLOCK, BlockManager, Grown
from alignedserve.engine.outputs import TokenOutput
from alignedserve.engine.request import NewRequest, Request, Status, Vocabulary, Work
from alignedserve.instance.requests import key_of
from alignedserve.kv.format import tokens_per_block
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

    def num_columns(self, num_tokens: int, keeps_inputs: bool = False) -> int:
        return -(-num_tokens // tokens_per_block(self.block_size, keeps_inputs))


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
        self.num_blocks = limits.num_blocks
        self.max_model_len = limits.max_model_len
        self.vocabulary = _VOCABULARY
        # Without a window until `keep_window`.
        self.span = replace(limits.span, window=0, max_step=0)
        self.format = SimFormat(
            limits.block_size,
            limits.block_size * cost.kv_bytes_per_token // self.span.num_groups,
            int(limits.block_size * cost.pool_bytes_per_token / self.span.num_groups),
        )
        self.grammars = SimGrammars()
        self.contents = self._make_contents()
        # Requests that have ever shared a block from both ends, and the seconds of the copies for that before the next
        # iteration.
        self._sharers: set[RequestId] = set()
        self._copies_s = 0.0
        self._cost = cost
        self._seconds = seconds
        self._computed = computed
        self._kv = kv or KvModel()
        self._chains: dict[RequestId, TokenChain] = {}
        self._blocks = BlockManager(limits.num_blocks, self.span)
        self._requests: dict[RequestId, Request] = {}
        # For each request, how many of its first columns other requests have filled.
        self._num_shared: Counter[RequestId] = Counter()
        # The right contents of a request's whole blocks, by group and column, when they were last checked.
        self._right: dict[RequestId, dict[tuple[int, int], Content]] = {}
        # For requests with KV that is not right, the lowest `Content.flaw`.
        self._flaws: dict[RequestId, int] = {}

    def _make_contents(self) -> BlockContents:
        return BlockContents(self.limits.block_size)

    @property
    def num_free_blocks(self) -> int:
        return self._blocks.num_free

    def keep_window(self, max_step: int) -> None:
        if self.limits.window:
            self.span = replace(self.limits.span, max_step=max_step)
            self._blocks.keep_window(self.span)

    # ---- requests ---------------------------------------------------------------------------------------------------

    def adopt(self, new: NewRequest) -> Request | None:
        request_id, layout = new.request_id, new.layout
        new.check(self.limits.can_keep_inputs)
        num_columns = self.format.num_columns(new.num_tokens, layout.keeps_inputs) - layout.num_lent
        num_passed = self.span.num_passed(new.num_computed)
        if self._blocks.num_missing(request_id, num_columns, num_passed) > self._blocks.num_free:
            return None
        self._know_tokens(new)
        # No token of the prompt is read; only its length counts.
        prompt = np.empty(len(new.prompt), dtype=np.int32)
        request = new.begin(prompt, frozenset(), self.max_model_len)
        if request.matcher is None and new.params.structured_outputs is not None:
            request.matcher = self.grammars.matcher(new.params.structured_outputs, owner="")
        request.max_output_len = min(request.max_output_len, model.own_output_len(new.seed))
        self._requests[request_id] = request
        self.contents.is_reversed(key_of(request_id), layout.is_reversed)
        self._grow(request_id, num_columns, num_passed)
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

    def free_passed(self, request: Request) -> None:
        num_passed = self.span.num_passed(request.num_computed)
        self._clear(self._blocks.free_passed(request.request_id, num_passed, request.num_tokens))

    def part(self, request: Request) -> None:
        request.status = Status.HELD

    def release(self, request: Request) -> None:
        self._blocks.free(request.request_id)
        self._num_shared.pop(request.request_id, None)
        self._right.pop(request.request_id, None)
        self._flaws.pop(request.request_id, None)
        self._chains.pop(request.request_id, None)
        self._sharers.discard(request.request_id)
        self.contents.forget(key_of(request.request_id))
        request.status = Status.FINISHED
        del self._requests[request.request_id]

    def blocks_of(self, request: Request, first: int = 0, end: int | None = None) -> list[BlockId]:
        return self._blocks.in_columns(request.request_id, first, end)

    def lease(self, owner: RequestId, num_blocks: int) -> list[BlockId]:
        blocks = self._blocks.allocate(owner, num_blocks)
        if blocks is None:
            raise RuntimeError(f"{owner}: planned {num_blocks} blocks, only {self._blocks.num_free} are free")
        self._clear([Grown(0, blocks)])
        return blocks

    def give_back(self, owner: RequestId) -> None:
        self._blocks.free(owner)

    def _grow(self, owner: RequestId, num_columns: int, num_passed: int = 0) -> None:
        grown = self._blocks.grow(owner, num_columns, num_passed)
        if grown is None:
            count = self._blocks.num_missing(owner, num_columns, num_passed)
            raise RuntimeError(f"{owner}: planned {count} blocks, only {self._blocks.num_free} are free")
        self._clear(grown)

    def _clear(self, grown: Sequence[Grown]) -> None:
        for _, blocks in grown:
            for block in blocks:
                self.contents.clear(block)

    # ---- blocks that two requests fill from both ends ----------------------------------------------------------------

    def make_checkpoints(self, num_parts: int) -> None:
        """Does nothing: the schedule bounds their number, and checks it."""

    def lend(self, borrower: Request, lender: Request, index: int) -> None:
        self._blocks.lend(borrower.request_id, lender.request_id, index)
        self._sharers |= {borrower.request_id, lender.request_id}

    def allocate_up_to(self, request: Request, num_columns: int) -> None:
        self._grow(request.request_id, num_columns)

    def checkpoint(self, lender: Request, index: int, first: int, end: int) -> int:
        key, block = key_of(lender.request_id), self._blocks.held(lender.request_id)[index]
        self.contents.save(key, block, index, first, end, partial(self._digest, lender.request_id))
        return self._copied(end - first, self._cost.channels.save)

    def give_up(self, lender: Request, index: int) -> None:
        self._blocks.give_up(lender.request_id, index)

    def renew(self, lender: Request, index: int) -> None:
        old, new = self._blocks.renew(lender.request_id, index)
        if old == NO_BLOCK:
            self.contents.clear(new)
        else:
            self.contents.copy(key_of(lender.request_id), old, new)

    def restore(self, lender: Request, index: int, first: int, end: int) -> int:
        key, block = key_of(lender.request_id), self._blocks.held(lender.request_id)[index]
        self.contents.restore(key, block, index, first, end)
        return self._copied(end - first, self._cost.channels.fetch)

    def cut(self, request: Request, num_tokens: int) -> None:
        request.num_computed = num_tokens
        self._blocks.cut(request.request_id, max(1, self.format.num_columns(num_tokens)))
        self.contents.drop(key_of(request.request_id))

    def _copied(self, num_tokens: int, channel: CopyChannel) -> int:
        num_bytes = num_tokens * self._cost.kv_bytes_per_token
        self._copies_s += channel.seconds(num_bytes)
        return num_bytes

    # ---- checks of block contents ------------------------------------------------------------------------------------

    def _check_content(self, request: Request) -> None:
        key, size = key_of(request.request_id), self._size_of(request)
        known, right = self._right.get(request.request_id, {}), dict[tuple[int, int], Content]()
        end = self.format.num_columns(request.num_computed, request.keeps_inputs)
        for group in range(self.span.num_groups):
            blocks = self._blocks.held(request.request_id, group)
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
        if group < self.span.num_full_groups or not self.span.window:
            return 0
        return max(request.num_computed + 1 - self.span.window, 0) // self._size_of(request)

    def _checked(self, request: Request, group: int, column: int, held: Content | None) -> Content:
        """Raises RuntimeError unless the block holds what the request needs there."""
        key, size = key_of(request.request_id), self._size_of(request)
        least = min(size, request.num_computed - column * size)
        is_its_own = column < self._num_shared[request.request_id] or (held and held.key == key)
        is_there = held is not None and (held.group, held.place) == (group, column)
        if held is None or not is_its_own or not is_there or held.num_tokens < least:
            raise RuntimeError(
                f"request {key} runs with {least} tokens in its block {column} of group {group}, which holds {held}"
            )
        self._check_digest(request, held)
        return held

    def _check_digest(self, request: Request, held: Content) -> None:
        """Raises RuntimeError unless the block holds KV of the request's own tokens, from a prefix of its own."""
        key, num_tokens = key_of(request.request_id), held.place * self._size_of(request) + held.num_tokens
        if held.is_inputs is not request.keeps_inputs:
            raise RuntimeError(
                f"request {key} takes inputs for KV, or KV for inputs, in its block {held.place}"
            )
        if held.is_reversed is not request.is_reversed:
            raise RuntimeError(f"request {key} reads its block {held.place} from the wrong end: {held}")
        if held.digest != self._chains[request.request_id].hash_of(num_tokens):
            raise RuntimeError(f"request {key} has KV of other tokens in its block {held.place}: {held}")
        if held.flaw:
            self._kv.check_flaw(key, held.flaw)
            self._flaws[request.request_id] = min(held.flaw, self._flaws.get(request.request_id, held.flaw))

    def _size_of(self, request: Request) -> int:
        """Returns how many of the request's tokens fit into a block."""
        return tokens_per_block(self.format.block_size, request.keeps_inputs)

    # ---- prefixes ---------------------------------------------------------------------------------------------------

    def num_known(self, block_hashes: Sequence[bytes], num_passed: int | None = None) -> int:
        return self._blocks.num_known(block_hashes, num_passed) * self.format.block_size

    def share(
        self, request_id: RequestId, block_hashes: Sequence[bytes], num_passed: int | None = None
    ) -> int:
        self._num_shared[request_id] = self._blocks.share(request_id, block_hashes, num_passed)
        return self._num_shared[request_id] * self.format.block_size

    def count_once(self, is_on: bool) -> None:
        self._blocks.count_once(is_on)

    @property
    def num_repeated(self) -> int:
        return self._blocks.num_repeated

    def num_shared(self, request_id: RequestId) -> int:
        return self._blocks.num_shared(request_id)

    def num_read_by_others(self, request_id: RequestId) -> float:
        return self._blocks.num_read_by_others(request_id)

    def num_held(self, block_hashes: Sequence[bytes], num_passed: int | None = None) -> int:
        return self._blocks.num_held(block_hashes, num_passed)

    def free_early(self, request_id: RequestId) -> None:
        if self._blocks.counts_once:
            self._blocks.free(request_id)

    def publish_blocks(self, request: Request, first: int, block_hashes: Sequence[bytes]) -> None:
        self._blocks.publish(request.request_id, first, block_hashes)

    def forget_all_hashes(self) -> None:
        self._blocks.forget_all()

    # ---- iterations -------------------------------------------------------------------------------------------------

    def launch(self, work: Work) -> SimIteration:
        chunks, lengths, requests, num_restored = [], [], [], 0
        block_size, has_window, computed = self.format.block_size, self.span.window > 0, self._computed
        has_contents = self.has_contents
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
            if request.keeps_inputs:
                num_restored += first
            # A token within a block needs no other block, unless it gets one in place of a passed block.
            if count > 1 or first % block_size == 0 or has_window:
                self._grow(request.request_id, self.format.num_columns(end, request.keeps_inputs))
            if has_contents:
                self._compute(request, end)
            request.num_computed = end
            computed[key_of(request.request_id)] += count
        computing_s = self._seconds(self._cost.iteration(chunks, lengths, num_restored), bool(chunks))
        copies_s, self._copies_s = self._copies_s, 0.0
        return SimIteration(requests, copies_s + computing_s)

    def _num_saved(self, request: Request) -> int:
        num_columns = self._blocks.num_read_by_others(request.request_id)
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
        if request.request_id in self._sharers or self.span.window or self.span.num_groups > 1:
            self._check_content(request)
        elif first:
            held = self.contents.get(key, self._blocks.held(request.request_id)[(first - 1) // size])
            if held is None:
                raise RuntimeError(f"request {key} goes on after {first} tokens, the last of which are gone")
            self._check_digest(request, held)
        for column in range(first // size, self.format.num_columns(end, request.keeps_inputs)):
            until = min(end, (column + 1) * size)
            digest = self._digest(request.request_id, until)
            content = Content(
                key,
                column,
                until - column * size,
                digest,
                is_inputs=request.keeps_inputs,
                flaw=self._flaws.get(request.request_id, 0),
                is_reversed=request.is_reversed,
            )
            for group in range(self.span.num_groups):
                block = self._blocks.held(request.request_id, group)[column]
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
        self._blocks.check_idle()
        if self._requests:
            raise RuntimeError(f"idle, but requests {sorted(self._requests)} are left")
