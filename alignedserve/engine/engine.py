"""The engine of one instance. It holds requests and the bytes of blocks, and computes what it is told, iteration by
iteration.

Its instance (`decode_worker`, `prefill_worker`) decides which requests are adopted, join and leave the batch, and are
released, which blocks each has (`instance/memory.py`), and how many tokens of each are computed. `launch` and `finish`
are the two halves of an iteration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from alignedserve.engine.adapter_places import AdapterPlaces
from alignedserve.engine.batch import BatchTable, Due
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
from alignedserve.kv.end_copies import Checkpoint, Cut, EndCopy, Renew, Restore
from alignedserve.kv.format import BlockFormat
from alignedserve.kv.groups import LayerGroups
from alignedserve.kv.held import NO_BLOCK
from alignedserve.kv.span import KvSpan
from alignedserve.protocol.pooling import DTYPE
from alignedserve.text.grammar import Grammars
from alignedserve.types import RequestId


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
        cache: KVCache,
        model: ModelTraits,
        grammars: Grammars,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        """`checkpoints`: None if no two requests fill a block from both ends."""
        self.adapter_places = model.adapters
        self.max_model_len = model.max_model_len
        self.vocabulary = model.vocabulary
        self.grammars = grammars
        self._runner = runner
        self.limits = limits
        self.cache = cache
        self.window = model.window if model.window < model.max_model_len else 0
        self.groups = model.groups
        form = cache.format
        # What a request holds if all of its blocks are saved before any is freed.
        self.span = KvSpan.of(self.groups, form.block_size, max_step=0)
        max_columns = form.num_columns(model.max_model_len)
        self._table = BatchTable(limits.max_num_seqs, max_columns, form.block_size, self.groups)
        self._endings = Endings(model.vocabulary)
        self._requests: dict[RequestId, Request] = {}
        self._checkpoints = checkpoints

    @property
    def adapters(self) -> Mapping[str, int]:
        """Adapter numbers by name."""
        return self.adapter_places.numbers if self.adapter_places else {}

    def adopt(self, new: NewRequest) -> Request:
        """Takes in a request that began elsewhere, or will continue there. The caller decides when it runs and leaves.

        Call `join` and `execute` once its blocks hold the KV of its computed tokens. A copy may read its blocks even
        after its end, so the caller frees them no earlier than `release`. Raises InvalidRequest if it can't be run.
        """
        if new.held.layout.is_reversed and self._checkpoints is None:
            raise RuntimeError(
                f"{new.request_id}: is reversed, and the engine was built without has_reversed"
            )
        new.check(self.limits.can_keep_inputs)
        return self._begin(new)

    def join(self, request: Request) -> None:
        """Adds the request to the batch. Its blocks must hold the KV of its computed tokens."""
        request.status, request.num_columns = Status.RUNNING, 0
        self._table.enter(request)
        self._table.add_columns(request)

    def part(self, request: Request) -> None:
        """Stops running the request, until `release` or until it joins again."""
        self._table.leave(request)
        request.status = Status.HELD

    def release(self, request: Request) -> None:
        """Ends the request."""
        if request.row >= 0:
            self._table.leave(request)
        if self._checkpoints:
            self._checkpoints.drop(request.request_id)
        request.status = Status.FINISHED
        del self._requests[request.request_id]

    def copy_ends(self, copies: Sequence[tuple[Request, EndCopy]]) -> Counter[str]:
        """Carries out these copies in order. Returns the number of bytes, by what was copied."""
        copied = Counter[str]()
        for request, copy in copies:
            if self._checkpoints is None:
                raise RuntimeError(
                    f"{request.request_id}: {copy}, and the engine was built without has_reversed"
                )
            match copy:
                case Checkpoint(_, index, block, first, end):
                    copied["checkpoint"] += self._checkpoints.save(
                        request.request_id, index, block, first, end
                    )
                case Renew(_, index, old, new):
                    if old != NO_BLOCK:
                        self.cache.copy(old, new)
                    self._table.set_block(request, index, new)
                case Restore(_, index, block, first, end):
                    copied["restore"] += self._checkpoints.restore(
                        request.request_id, index, block, first, end
                    )
                case Cut(_, num_tokens):
                    request.num_computed = num_tokens
                    self._checkpoints.drop(request.request_id)
        return copied

    def reset(self) -> None:
        """Ends all requests, even if an exception in the middle of a step has left them in an inconsistent state."""
        self._requests.clear()
        if self._checkpoints:
            self._checkpoints.reset()
        self._table.reset()

    @property
    def format(self) -> BlockFormat:
        return self.cache.format

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    def execute(self, work: Work) -> list[TokenOutput]:
        """Runs one iteration: computes these numbers of tokens of these requests. They must have joined, and have
        blocks for these tokens."""
        return self.finish(self.launch(work))

    def launch(self, work: Work) -> LaunchedIteration:
        """The first half of `execute`: everything that needs no new tokens. A GPU has work when it returns."""
        batch = self._table.batch(work)
        for entry in self._table.outgrown(batch):
            request, count = batch.work[entry]
            self._table.add_columns(request)
            needed = request.layout.num_columns(request.num_computed + count, self.limits.block_size)
            if needed > request.num_columns:
                raise RuntimeError(
                    f"{request.request_id}: {count} tokens are planned, which need {needed} columns of blocks, "
                    f"and it has {request.num_columns}"
                )
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
