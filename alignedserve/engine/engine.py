"""The engine of one instance: requests in, tokens out, one iteration at a time.

`step` is the table of contents: plan what to run, move requests as planned, run, apply what came out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from alignedserve.engine.batch import BatchTable, Due
from alignedserve.engine.blocks import BlockManager
from alignedserve.engine.endings import Endings
from alignedserve.engine.kv_cache import KVCache
from alignedserve.engine.outputs import BrokenLogits, TokenOutput
from alignedserve.engine.policy import IterationPolicy, Limits, Plan, Queues
from alignedserve.engine.prefix_cache import PrefixCache
from alignedserve.engine.request import Request, Status, Work
from alignedserve.engine.runner import Launched, ModelRunner
from alignedserve.engine.sampler import Sampled
from alignedserve.engine.validate import Vocabulary, check_request
from alignedserve.kv_format import BlockFormat
from alignedserve.sampling_params import SamplingParams
from alignedserve.text.grammar import Grammars, Matcher
from alignedserve.types import BlockId, RequestId


@dataclass
class Iteration:
    """One that has been launched. Nobody enters or leaves the batch until it is finished."""

    launched: Launched
    # those who get a token first, in the order of `requests`; tokens and what comes of them are filled in by `finish`
    outputs: list[TokenOutput]
    # those of whose prompts it computes a chunk
    chunked: list[Request]

    @property
    def requests(self) -> list[Request]:
        """Who gets a token, or an error instead."""
        return self.launched.due.requests


class Engine:
    def __init__(
        self,
        runner: ModelRunner,
        policy: IterationPolicy,
        blocks: BlockManager,
        cache: KVCache,
        table: BatchTable,
        vocabulary: Vocabulary,
        max_model_len: int,
        grammars: Grammars,
        shares_prefixes: bool = False,
    ) -> None:
        """`shares_prefixes`: of requests that are added. Of those that are adopted it is the caller's business."""
        self.max_model_len = max_model_len
        self.vocabulary = vocabulary
        self.grammars = grammars
        self._runner = runner
        self._policy = policy
        self._blocks = blocks
        self.cache = cache
        self._table = table
        self._endings = Endings(vocabulary)
        self._prefixes = PrefixCache(blocks, cache.format.block_size, shares_prefixes)
        self._queues = Queues(num_found=self._prefixes.num_found)
        self._requests: dict[RequestId, Request] = {}

    def add_request(
        self, request_id: RequestId, prompt_token_ids: Sequence[int], params: SamplingParams, seed: int
    ) -> Request:
        """Queues a request. Raises InvalidRequest, and nothing is queued, when it can't be run."""
        if params.structured_outputs is not None:
            self.grammars.check(params.structured_outputs)
        request = self._request(request_id, prompt_token_ids, params, seed)
        self._prefixes.add(request)
        self._queues.waiting.append(request)
        return request

    def adopt(
        self,
        request_id: RequestId,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        seed: int,
        output: Sequence[int] = (),
        num_computed: int = 0,
        matcher: Matcher | None = None,
    ) -> Request | None:
        """Takes in a request that began elsewhere, or will go on there. Who adopts it says when it runs and leaves.

        It gets blocks for all of its tokens, those that it shares (`share`) included. Once the KV of the first
        `num_computed` is in them: `join`, `execute`. It holds them, after its end too, until `release`: they may be
        under a copy.
        `matcher`: its own, from `grammars`, if the caller had it made. One that is not ready compiles when the first
        token is due, and all who run wait for it.
        None, and nothing changed (what it shares is held still), when there are too few. Raises InvalidRequest when it
        can't be run.
        """
        num_blocks = self.cache.format.num_blocks(len(prompt_token_ids) + len(output))
        num_blocks -= len(self._blocks.held(request_id))
        if num_blocks > self._blocks.num_free:
            return None
        request = self._request(request_id, prompt_token_ids, params, seed, matcher)
        request.status, request.is_adopted = Status.HELD, True
        request.output, request.num_computed = list(output), num_computed
        if params.has_penalties:
            request.output_counts = dict(Counter(output))
        self._blocks.allocate(request_id, num_blocks)
        return request

    def num_known(self, names: Sequence[bytes]) -> int:
        """Of how many tokens, those of the first of these names, the KV is there."""
        return self._blocks.num_known(names) * self.cache.format.block_size

    def share(self, request_id: RequestId, names: Sequence[bytes]) -> int:
        """A request that will be adopted shares the blocks of these names (`alignedserve/prefixes.py`), as far as they
        are known. Returns of how many tokens the KV is there."""
        return self._blocks.share(request_id, names) * self.cache.format.block_size

    def name_blocks(self, request: Request, first: int, names: Sequence[bytes]) -> None:
        """The KV in the request's blocks from `first` on is there, for others to share."""
        self._blocks.name(request.request_id, first, names)

    def forget_names(self, names: Sequence[bytes]) -> None:
        """Nobody shares the blocks of these names from here on but those who do already."""
        self._blocks.forget(names)

    def blocks_of(self, request: Request) -> list[BlockId]:
        return list(self._blocks.held(request.request_id))

    def join(self, request: Request) -> None:
        """The KV of its computed tokens is in its blocks: it can run."""
        request.num_blocks = 0
        self._enter(request, 0)
        self._table.add_blocks(request, self.blocks_of(request))

    def part(self, request: Request) -> None:
        """It runs no more. Its blocks stay as they are until `release`, or until it joins again."""
        self._queues.running.remove(request)
        self._table.leave(request)
        request.status = Status.HELD

    def release(self, request: Request) -> None:
        """Ends an adopted request; its blocks are free."""
        if request.status is Status.RUNNING:
            self._queues.running.remove(request)
        self._release(request)

    def lease(self, owner: RequestId, num_blocks: int) -> list[BlockId]:
        """Blocks for KV that is only passed on: no request of this engine has it. Held until `give_back`."""
        blocks = self._blocks.allocate(owner, num_blocks)
        if blocks is None:
            raise RuntimeError(f"{owner}: planned {num_blocks} blocks, only {self._blocks.num_free} are free")
        return blocks

    def give_back(self, owner: RequestId) -> None:
        self._blocks.free(owner)

    def abort(self, request_id: RequestId) -> bool:
        """Ends a request wherever it is; its blocks are free at once. False if it had ended already."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        if request.status is Status.WAITING:
            self._queues.waiting.remove(request)
        elif request.status is Status.PREEMPTED:
            self._queues.preempted.remove(request)
        elif request.status is Status.RUNNING:
            self._queues.running.remove(request)
        self._release(request)
        return True

    def reset(self) -> None:
        """Ends all requests, also where an exception in the middle of a step has left them half moved."""
        self._requests.clear()
        self._queues = Queues(num_found=self._prefixes.num_found)
        self._prefixes.reset()
        self._blocks.reset()
        self.cache.reset()
        self._table.reset()

    @property
    def format(self) -> BlockFormat:
        return self.cache.format

    @property
    def limits(self) -> Limits:
        return self._policy.limits

    @property
    def num_blocks(self) -> int:
        return self._blocks.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._blocks.num_free

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    def step(self) -> list[TokenOutput]:
        plan = self._policy.plan(self._queues, self._blocks.num_free)
        self._move(plan)
        if not plan.work:
            self._check_progress(plan)
            return []
        return self.execute(plan.work)

    def execute(self, work: Work) -> list[TokenOutput]:
        """One iteration: computes so many tokens of these requests, which have joined. There must be blocks."""
        return self.finish(self.launch(work))

    def launch(self, work: Work) -> Iteration:
        """The first half of `execute`, and all of it that needs no tokens: a GPU is left with work to do."""
        batch = self._table.batch(work)
        for entry in self._table.outgrown(batch):
            request, count = batch.work[entry]
            self._grow(request, request.num_computed + count)
        launched = self._runner.launch(self._table, batch)
        self._queues.is_decoding = batch.is_decode and len(batch.work) == len(self._queues.running)
        self._table.computed(batch)
        chunked = [request for request, _ in batch.work[batch.num_decodes :]]
        return Iteration(launched, self._announce(launched), chunked)

    def finish(self, iteration: Iteration) -> list[TokenOutput]:
        """The second half: waits for the tokens, and ends requests."""
        launched = iteration.launched
        self._apply(launched.due, iteration.outputs, self._runner.finish(launched))
        for request in iteration.chunked:
            self._prefixes.computed(request)
        return iteration.outputs

    def check_idle(self) -> None:
        """Nothing is left of finished requests. Raises with both numbers otherwise."""
        self._blocks.check_idle()
        if self._requests or len(self._queues) or self.cache.num_saved_blocks:
            raise RuntimeError(
                f"idle, but {len(self._requests)} requests, {len(self._queues)} queued, "
                f"{self.cache.num_saved_blocks} saved blocks are left"
            )

    def _check_progress(self, plan: Plan) -> None:
        if self._requests and not plan.evict:
            raise RuntimeError(
                f"{len(self._requests)} requests wait, {self._blocks.num_free} of {self._blocks.num_blocks} "
                f"blocks are free, and policy {self._policy.name} runs none of them"
            )

    def _request(
        self,
        request_id: RequestId,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        seed: int,
        matcher: Matcher | None = None,
    ) -> Request:
        if request_id in self._requests:
            raise ValueError(f"request_id={request_id!r}: a request with this id is running")
        check_request(prompt_token_ids, params, self.vocabulary, self.max_model_len)
        room = self.max_model_len - len(prompt_token_ids)
        if matcher is None and params.structured_outputs is not None:
            matcher = self.grammars.matcher(params.structured_outputs)
        stops = frozenset(params.stop_token_ids or ())
        request = Request(
            request_id=request_id,
            prompt=np.asarray(prompt_token_ids, dtype=np.int32),
            params=params,
            seed=seed,
            stop_token_ids=stops if params.ignore_eos else stops | self.vocabulary.eos_token_ids,
            max_output_len=min(room, params.max_tokens or room),
            matcher=matcher,
        )
        self._endings.watch(request)
        self._requests[request_id] = request
        return request

    def _move(self, plan: Plan) -> None:
        for request in plan.evict:
            self._evict(request)
        for request in plan.resume:
            self._resume(request)
        for request in plan.admit:
            self._queues.waiting.remove(request)
            shared = self._prefixes.share(request)
            self._enter(request, request.num_tokens, shared)

    def _evict(self, request: Request) -> None:
        held = self._blocks.held(request.request_id)
        num_used = self.cache.format.num_blocks(request.num_computed)
        self.cache.save(request.request_id, held[:num_used])
        self._queues.running.remove(request)
        self._leave(request)
        self._prefixes.evicted(request)
        request.status = Status.PREEMPTED
        self._queues.preempted.append(request)

    def _resume(self, request: Request) -> None:
        self._queues.preempted.remove(request)
        self._enter(request, request.num_tokens)
        self.cache.restore(request.request_id, self._blocks.held(request.request_id))

    def _enter(self, request: Request, num_tokens: int, shared: Sequence[BlockId] = ()) -> None:
        request.status = Status.RUNNING
        self._queues.running.append(request)
        self._queues.is_decoding = False
        self._table.enter(request)
        self._table.add_blocks(request, shared)
        self._grow(request, num_tokens)

    def _leave(self, request: Request) -> None:
        self._table.leave(request)
        self._blocks.free(request.request_id)
        request.num_blocks = 0

    def _grow(self, request: Request, num_tokens: int) -> None:
        """Blocks for the KV of the first `num_tokens` tokens."""
        count = self.cache.format.num_blocks(num_tokens) - request.num_blocks
        if count <= 0:
            return
        blocks = self._blocks.allocate(request.request_id, count)
        if blocks is None:
            raise RuntimeError(
                f"{request.request_id}: planned {count} blocks, only {self._blocks.num_free} are free"
            )
        self._table.add_blocks(request, blocks)

    def _announce(self, launched: Launched) -> list[TokenOutput]:
        """All that is said about an iteration, but for the tokens: those who get one first, in order."""
        logprobs = launched.prompt_logprobs
        outputs = [
            TokenOutput(request.request_id, None, prompt_logprobs=logprobs.pop(request, None))
            for request in launched.due.requests
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

    def _end_if_over(self, request: Request, output: TokenOutput) -> None:
        if output.error is None:
            output.finish_reason, output.stop_reason = self._endings.reasons(request)
        else:
            self._prefixes.spoilt(request)
        if output.finish_reason:
            self._finish(request)

    def _finish(self, request: Request) -> None:
        if request.is_adopted:
            self.part(request)
        else:
            self._queues.running.remove(request)
            self._release(request)

    def _release(self, request: Request) -> None:
        if request.row >= 0:
            self._table.leave(request)
        self._prefixes.ended(request)
        self._blocks.free(request.request_id)
        self.cache.drop(request.request_id)
        request.status = Status.FINISHED
        del self._requests[request.request_id]


def _errors(due: Due, sampled: Sampled) -> dict[int, Exception]:
    """Of rows that get no token."""
    errors: dict[int, Exception] = dict(sampled.failed)
    for row in sampled.broken:
        errors[row] = _broken(due.requests[row])
    return errors


def _broken(request: Request) -> BrokenLogits:
    position = request.num_tokens
    return BrokenLogits(f"{request.request_id}: NaN or infinite logits for the token at position {position}")
