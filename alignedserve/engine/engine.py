"""The engine of one instance. It holds requests and their blocks, and computes what it is told, iteration by iteration.

Its instance (`decode_worker`, `prefill_worker`) decides which requests are adopted, join and leave the batch, and are
released, and how many tokens of each are computed. `launch` and `finish` are the two halves of an iteration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from alignedserve.engine.adapter_places import AdapterPlaces
from alignedserve.engine.batch import BatchTable, Due
from alignedserve.engine.blocks import NO_BLOCK, BlockManager, Grown
from alignedserve.engine.checkpoints import Checkpoints
from alignedserve.engine.kv_cache import KVCache
from alignedserve.engine.limits import EngineLimits
from alignedserve.engine.outputs import BrokenLogits, TokenOutput
from alignedserve.engine.request import (
    Endings,
    NewRequest,
    Request,
    Status,
    Vocabulary,
    Work,
    check_adapter,
    check_request,
)
from alignedserve.engine.runner import Launched, ModelRunner
from alignedserve.engine.sampler import Sampled
from alignedserve.kv.format import BlockFormat
from alignedserve.kv.groups import LayerGroups
from alignedserve.kv.span import KvSpan
from alignedserve.protocol.pooling import DTYPE
from alignedserve.text.grammar import Grammars
from alignedserve.types import BlockId, RequestId


@dataclass
class LaunchedIteration:
    """An iteration that was launched. No request enters or leaves the batch until it is finished."""

    launched: Launched
    # Outputs of `requests` come first, in that order. `finish` fills in tokens and embeddings.
    outputs: list[TokenOutput]

    @property
    def requests(self) -> list[Request]:
        """The requests that get a token, an embedding or an error."""
        return self.launched.requests


@dataclass(frozen=True)
class ModelTraits:
    """What requests must know of the model."""

    vocabulary: Vocabulary
    max_model_len: int
    # See `ModelConfig.window`.
    window: int
    # See `choose_layer_groups`.
    groups: LayerGroups
    # None: it has no adapters.
    adapters: AdapterPlaces | None


class Engine:
    def __init__(
        self,
        runner: ModelRunner,
        limits: EngineLimits,
        blocks: BlockManager,
        cache: KVCache,
        model: ModelTraits,
        grammars: Grammars,
        has_reversed: bool = False,
    ) -> None:
        self.adapter_places = model.adapters
        self.max_model_len = model.max_model_len
        self.vocabulary = model.vocabulary
        self.grammars = grammars
        self._has_reversed = has_reversed
        self._runner = runner
        self.limits = limits
        self._blocks = blocks
        self.cache = cache
        self.window = model.window if model.window < model.max_model_len else 0
        self.groups = model.groups
        form = cache.format
        self.span = KvSpan.of_whole_requests(self.groups, form.block_size)
        max_columns = form.num_columns(model.max_model_len)
        self._table = BatchTable(limits.max_num_seqs, max_columns, form.block_size, self.groups)
        self._endings = Endings(model.vocabulary)
        self._requests: dict[RequestId, Request] = {}
        self._checkpoints: Checkpoints | None = None

    @property
    def adapters(self) -> Mapping[str, int]:
        """Adapter numbers by name."""
        return self.adapter_places.numbers if self.adapter_places else {}

    def keep_window(self, max_step: int) -> None:
        """Makes requests free the blocks that they pass, and hold none too far ahead (`max_step`: see `KvSpan`). Called
        before the first request; does nothing without a window."""
        if self.groups.window:
            self.span = KvSpan.of(self.groups, self.format.block_size, max_step)
            self._blocks.keep_window(self.span)

    def adopt(self, new: NewRequest) -> Request | None:
        """Takes in a request that began elsewhere, or will continue there. The caller decides when it runs and leaves.

        The request gets blocks for all of its tokens, shared ones (`share`) included, as far as `span` requires. Call
        `join` and `execute` once these hold the KV of its computed tokens. It holds its blocks until `release`, even
        after its end, because a copy may still read them. Passed blocks are held until `free_passed`.

        Returns None and changes nothing if too few blocks are free; shared blocks stay held. Raises InvalidRequest if
        the request can't be run.
        """
        layout = new.layout
        if layout.is_reversed and not self._has_reversed:
            raise RuntimeError(
                f"{new.request_id}: is reversed, and the engine was built without has_reversed"
            )
        new.check(self.limits.can_keep_inputs)
        num_columns = self.format.num_columns(new.num_tokens, layout.keeps_inputs) - layout.num_lent
        num_passed = self.span.num_passed(new.num_computed)
        if self._blocks.num_missing(new.request_id, num_columns, num_passed) > self._blocks.num_free:
            return None
        request = self._begin(new)
        self._blocks.grow(new.request_id, num_columns, num_passed)
        return request

    def num_known(self, block_hashes: Sequence[bytes], num_passed: int | None = None) -> int:
        """The number of tokens with cached KV under the leading block hashes. `num_passed`: see `share`."""
        return self._blocks.num_known(block_hashes, num_passed) * self.cache.format.block_size

    def share(
        self, request_id: RequestId, block_hashes: Sequence[bytes], num_passed: int | None = None
    ) -> int:
        """Lets a request that will be adopted share the blocks with these hashes (`scheduling/prefixes.py`), as far
        as they are known. Returns the number of tokens with KV. `num_passed`: the columns that it has passed, if it
        gets the KV after these hashes from the pool or from another instance."""
        return self._blocks.share(request_id, block_hashes, num_passed) * self.cache.format.block_size

    def count_once(self, is_on: bool) -> None:
        """Counts a block with several owners once, or once for each of them. Called before the first request, after
        `keep_window`; with a window, each owner counts."""
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
        """If shared blocks are counted once, frees the blocks of a request that will be released before the next
        iteration. What others share from here on then no longer counts as its."""
        if self._blocks.counts_once:
            self._blocks.free(request_id)

    def publish_blocks(self, request: Request, first: int, block_hashes: Sequence[bytes]) -> None:
        """Publishes the request's blocks from column `first` on, for others to share. Their KV must be complete."""
        self._blocks.publish(request.request_id, first, block_hashes)

    def forget_all_hashes(self) -> None:
        """Stops sharing all blocks from here on. Requests that share them already keep them."""
        self._blocks.forget_all()

    def blocks_of(self, request: Request, first: int = 0, end: int | None = None) -> list[BlockId]:
        """The request's blocks in these columns, or in all, column by column. NO_BLOCK stands for passed ones."""
        return self._blocks.in_columns(request.request_id, first, end)

    def join(self, request: Request) -> None:
        """Adds the request to the batch. Its blocks must hold the KV of its computed tokens."""
        request.status, request.num_columns = Status.RUNNING, 0
        self._table.enter(request)
        held = [self._blocks.held(request.request_id, group) for group in range(self.span.num_groups)]
        self._table.add_columns(request, [Grown(0, blocks) for blocks in held])

    def free_passed(self, request: Request) -> None:
        """Frees the blocks that the running request has passed, and gives it the new ones that it gets in their
        place."""
        num_passed = self.span.num_passed(request.num_computed)
        grown = self._blocks.free_passed(request.request_id, num_passed, request.num_tokens)
        self._table.pass_columns(request, num_passed)
        self._table.add_columns(request, grown)

    def part(self, request: Request) -> None:
        """Stops running the request. Its blocks stay as they are until `release`, or until it joins again."""
        self._table.leave(request)
        request.status = Status.HELD

    def release(self, request: Request) -> None:
        """Ends the request, and frees its blocks."""
        if request.row >= 0:
            self._table.leave(request)
        self._blocks.free(request.request_id)
        if self._checkpoints:
            self._checkpoints.drop(request.request_id)
        request.status = Status.FINISHED
        del self._requests[request.request_id]

    # ---- blocks that two requests fill from both ends ----------------------------------------------------------------

    def make_checkpoints(self, num_parts: int) -> None:
        """Allocates host memory to save KV that is overwritten in `num_parts` blocks. Called once, before the first
        request."""
        self._checkpoints = Checkpoints(self.cache.parts, num_parts)

    def lend(self, borrower: Request, lender: Request, index: int) -> None:
        """Makes the lender's block the borrower's next one, too. It may come later than the next column that the
        borrower needs; `allocate_up_to` fills the columns before it."""
        block = self._blocks.lend(borrower.request_id, lender.request_id, index)
        self._table.add_columns(borrower, [Grown(borrower.num_columns, [block])])

    def allocate_up_to(self, request: Request, num_columns: int) -> None:
        """Makes the request hold blocks for `num_columns` columns."""
        self._grow(request, num_columns)

    def checkpoint(self, lender: Request, index: int, first: int, end: int) -> int:
        """Copies tokens `first` to `end` of the lender's block to host memory. Returns the number of bytes."""
        checkpoints = self._kept
        block = self._blocks.held(lender.request_id)[index]
        checkpoints.save(lender.request_id, index, block, first, end)
        return (end - first) * checkpoints.bytes_per_token

    def give_up(self, lender: Request, index: int) -> None:
        """Gives up the lender's side of a block with two owners. The lender can't run until `renew`."""
        self._blocks.give_up(lender.request_id, index)

    def renew(self, lender: Request, index: int) -> None:
        """Gives the lender a fresh block for this index, with a copy of the shared one unless that was given up."""
        old, new = self._blocks.renew(lender.request_id, index)
        if old != NO_BLOCK:
            self.cache.copy(old, new)
        self._table.set_block(lender, index, new)

    def restore(self, lender: Request, index: int, first: int, end: int) -> int:
        """Copies tokens back from host memory. Returns the number of bytes."""
        checkpoints = self._kept
        block = self._blocks.held(lender.request_id)[index]
        checkpoints.restore(lender.request_id, index, block, first, end)
        return (end - first) * checkpoints.bytes_per_token

    def cut(self, request: Request, num_tokens: int) -> None:
        """Cuts a request that does not run to the KV of its first `num_tokens` tokens, and to their blocks. One block
        stays even with no KV."""
        request.num_computed = num_tokens
        self._blocks.cut(request.request_id, max(1, self.cache.format.num_columns(num_tokens)))
        if self._checkpoints:
            self._checkpoints.drop(request.request_id)

    @property
    def _kept(self) -> Checkpoints:
        if self._checkpoints is None:
            raise RuntimeError("make_checkpoints was not called, and KV is to be saved")
        return self._checkpoints

    # ---- blocks for others -------------------------------------------------------------------------------------------

    def lease(self, owner: RequestId, num_blocks: int) -> list[BlockId]:
        """Leases blocks for KV that is only forwarded, and belongs to no request of this engine. They are held until
        `give_back`."""
        blocks = self._blocks.allocate(owner, num_blocks)
        if blocks is None:
            raise RuntimeError(f"{owner}: planned {num_blocks} blocks, only {self._blocks.num_free} are free")
        return blocks

    def give_back(self, owner: RequestId) -> None:
        self._blocks.free(owner)

    def reset(self) -> None:
        """Ends all requests, even if an exception in the middle of a step has left them in an inconsistent state."""
        self._requests.clear()
        self._checkpoints = None
        self._blocks.reset()
        self._table.reset()

    @property
    def format(self) -> BlockFormat:
        return self.cache.format

    @property
    def num_blocks(self) -> int:
        return self._blocks.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._blocks.num_free

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    def execute(self, work: Work) -> list[TokenOutput]:
        """Runs one iteration: computes these numbers of tokens of these requests. They must have joined, and enough
        blocks must be free."""
        return self.finish(self.launch(work))

    def launch(self, work: Work) -> LaunchedIteration:
        """The first half of `execute`: everything that needs no new tokens. A GPU has work when it returns."""
        batch = self._table.batch(work)
        for entry in self._table.outgrown(batch):
            request, count = batch.work[entry]
            num_tokens = request.num_computed + count
            self._grow(request, self.format.num_columns(num_tokens, request.keeps_inputs))
        launched = self._runner.launch(self._table, batch)
        self._table.computed(batch)
        return LaunchedIteration(launched, self._announce(launched))

    def finish(self, iteration: LaunchedIteration) -> list[TokenOutput]:
        """The second half: waits for the tokens, and ends requests."""
        launched = iteration.launched
        self._apply(launched.due, iteration.outputs, self._runner.finish(launched))
        self._end_embedded(launched, iteration.outputs)
        return iteration.outputs

    def confirm(self) -> None:
        """Raises if a result so far may be wrong, KV included."""
        self._runner.confirm()

    def check_idle(self) -> None:
        """Raises RuntimeError with both numbers if anything of finished requests is left."""
        self._blocks.check_idle()
        if self._checkpoints:
            self._checkpoints.check_idle()
        if self._requests:
            raise RuntimeError(f"idle, but {len(self._requests)} requests are left")

    def _begin(self, new: NewRequest) -> Request:
        if new.request_id in self._requests:
            raise ValueError(f"request_id={new.request_id!r}: a request with this id is running")
        params = new.params
        check_request(new.prompt, params, self.vocabulary, self.max_model_len, new.pooling)
        check_adapter(new.adapter, self.adapters)
        stops = frozenset(params.stop_token_ids or ())
        stops = stops if params.ignore_eos else stops | self.vocabulary.eos_token_ids
        request = new.begin(np.asarray(new.prompt, dtype=np.int32), stops, self.max_model_len)
        if request.matcher is None and params.structured_outputs is not None:
            request.matcher = self.grammars.matcher(params.structured_outputs, owner="")
        request.adapter = self.adapters.get(new.adapter, 0)
        if params.has_penalties:
            request.output_counts = dict(Counter(new.output))
        self._endings.watch(request)
        self._requests[new.request_id] = request
        return request

    def _grow(self, request: Request, num_columns: int) -> None:
        """Makes the running request hold blocks for `num_columns` columns, as far as `span` requires."""
        grown = self._blocks.grow(request.request_id, num_columns)
        if grown is None:
            count = self._blocks.num_missing(request.request_id, num_columns)
            raise RuntimeError(
                f"{request.request_id}: planned {count} blocks, only {self._blocks.num_free} are free"
            )
        self._table.add_columns(request, grown)

    def _announce(self, launched: Launched) -> list[TokenOutput]:
        """The iteration's outputs, still without tokens. Those of `LaunchedIteration.requests` come first, in order."""
        logprobs = launched.prompt_logprobs
        outputs = [
            TokenOutput(request.request_id, None, prompt_logprobs=logprobs.pop(request, None))
            for request in launched.requests
        ]
        outputs += [
            TokenOutput(request.request_id, None, prompt_logprobs=found)
            for request, found in logprobs.items()
        ]
        return outputs

    def _apply(self, due: Due, outputs: list[TokenOutput], sampled: Sampled) -> None:
        errors = _errors(due, sampled)
        for row, error in errors.items():
            outputs[row].finish_reason, outputs[row].error = "error", error
        for request, output, token in zip(due.requests, outputs, sampled.tokens.tolist(), strict=False):
            if output.error is None:
                output.token_id = token
                request.output.append(token)
        for row in due.counted:
            counts, token = due.requests[row].output_counts, int(sampled.tokens[row])
            counts[token] = counts.get(token, 0) + 1
        for row, logprobs in sampled.logprobs.items():
            outputs[row].logprobs = logprobs
        num_left = self._table.append_tokens(due, sampled.tokens)
        for row in sorted({*errors, *self._endings.suspects(sampled.tokens, num_left)}):
            self._end_if_over(due.requests[row], outputs[row])

    def _end_embedded(self, launched: Launched, outputs: list[TokenOutput]) -> None:
        first = len(launched.due.requests)
        for output, (request, embedding) in zip(outputs[first:], launched.embedded, strict=False):
            found = embedding.cpu().numpy()
            if np.isfinite(found).all():
                output.embedding, output.finish_reason = found.astype(DTYPE).tobytes(), "stop"
            else:
                output.finish_reason, output.error = "error", _broken_states(request)
            self.part(request)

    def _end_if_over(self, request: Request, output: TokenOutput) -> None:
        if output.error is None:
            output.finish_reason, output.stop_reason = self._endings.reasons(request)
        if output.finish_reason:
            self.part(request)


def _errors(due: Due, sampled: Sampled) -> dict[int, Exception]:
    """The errors of rows that get no token."""
    errors: dict[int, Exception] = dict(sampled.failed)
    for row in sampled.broken:
        errors[row] = _broken(due.requests[row])
    return errors


def _broken_states(request: Request) -> BrokenLogits:
    return BrokenLogits(f"{request.request_id}: NaN or infinite states of the prompt")


def _broken(request: Request) -> BrokenLogits:
    position = request.num_tokens
    return BrokenLogits(f"{request.request_id}: NaN or infinite logits for the token at position {position}")
