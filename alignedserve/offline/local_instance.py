"""A colocated instance in the caller's process, without a router.

`step` offers waiting requests to the worker, runs an iteration, and returns its outputs. Preempted requests keep their
KV in memory of this process (`host_memory.py`) until they are admitted again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from msgspec.structs import replace

from alignedserve.decode_worker.worker import ColocatedWorker
from alignedserve.engine.engine import Engine
from alignedserve.engine.outputs import TokenOutput
from alignedserve.engine.request import check_adapter, check_request
from alignedserve.instance.config import QUICK_BYTES, TransferConfig
from alignedserve.instance.live_transfers import LiveTransfers
from alignedserve.instance.worker import Step
from alignedserve.offline.host_memory import SwapMemory
from alignedserve.protocol.messages import (
    Abort,
    AnyMessage,
    DecodeReport,
    Evict,
    Failed,
    ForgetAll,
    Gone,
    Offer,
    Work,
)
from alignedserve.protocol.messages import Request as Asked
from alignedserve.sampling_params import SamplingParams
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies import Policy, make_policy
from alignedserve.timing.deadlines import Deadlines
from alignedserve.timing.estimate import Estimate
from alignedserve.types import Epoch, PoolBlockId, RequestId, RequestKey

# Maximum number of offered requests per slot. Each iteration looks at all of them, and two are enough to choose from.
OFFERED = 2
# Maximum seconds to wait for a copy or a grammar. Its end interrupts the wait.
WAIT_S = 1.0


@dataclass(eq=False)
class LocalRequest:
    request_id: RequestId
    key: RequestKey
    work: Work
    output: list[int] = field(default_factory=list)
    # Prompt tokens with KV in the prefix cache when the request started.
    num_found: int = 0
    # Blocks in host memory, while it is preempted or being copied.
    blocks: list[PoolBlockId] = field(default_factory=list)


class _Worker(ColocatedWorker):
    """Collects the engine's outputs for `step`."""

    outputs: list[TokenOutput]

    def _take_outputs(self, step: Step, outputs: Sequence[TokenOutput]) -> None:
        self.outputs += outputs
        super()._take_outputs(step, outputs)


class LocalInstance:
    def __init__(
        self,
        engine: Engine,
        policy: Policy | None = None,
        enable_prefix_caching: bool = False,
        estimate: Estimate | None = None,
        pool_kv_dtype: str = "auto",
        verify_blocks: float = 0.0,
    ) -> None:
        """`pool_kv_dtype`: dtype of KV in host memory, one of POOL_KV_DTYPES. `verify_blocks`: see TransferConfig."""
        self.engine = engine
        self._pool_format = engine.format.in_pool(pool_kv_dtype)
        self._transfer_config = TransferConfig(quick_bytes=QUICK_BYTES, verify_blocks=verify_blocks)
        self._policy = policy or make_policy(SchedulingConfig("fcfs"))
        self._enable_prefix_caching = enable_prefix_caching
        self._estimate = estimate
        self._keys = count(1)
        self._wake = threading.Event()
        self._memory: SwapMemory | None = None
        # Number of preemptions that kept the KV, and that dropped it.
        self.num_evictions = self.num_drops = 0
        self._begin()

    def _begin(self) -> None:
        self._transfers = LiveTransfers(
            self.engine.cache.parts,
            Epoch(1),
            self._wake.set,
            self._transfer_config,
            self._pool_format,
            self.engine.format.num_groups,
        )
        self._worker = _Worker(
            self.engine,
            self._transfers,
            self._policy,
            self._estimate,
            enable_prefix_caching=self._enable_prefix_caching,
        )
        self._worker.outputs = []
        self._requests: dict[RequestKey, LocalRequest] = {}
        self._by_id: dict[RequestId, LocalRequest] = {}
        # Requests that are not offered yet, and the keys of those that are offered but not admitted.
        self._waiting: deque[LocalRequest] = deque()
        self._offered: set[RequestKey] = set()
        # The number of times that all shared KV was forgotten, because some might be wrong.
        self._era = 0
        # Aborted requests, with blocks that may still be copied.
        self._leaving: dict[RequestKey, LocalRequest] = {}

    # ---- requests ----------------------------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: RequestId,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        seed: int,
        deadlines: Deadlines | None = None,
        pooling: str | None = None,
        adapter: str = "",
    ) -> LocalRequest:
        """Queues a request. Without deadlines it is best effort.

        Raises InvalidRequest if it can't run; then nothing is queued. `pooling`, `adapter`: see
        `protocol.messages.Request`.
        """
        if request_id in self._by_id:
            raise ValueError(f"request_id={request_id!r}: a request with this id is running")
        if params.structured_outputs is not None:
            self.engine.grammars.check(params.structured_outputs)
        check_request(prompt_token_ids, params, self.engine.vocabulary, self.engine.max_model_len, pooling)
        check_adapter(adapter, self.engine.adapters)
        key = RequestKey(next(self._keys))
        prompt = list(prompt_token_ids)
        asked = Asked(key, prompt, params, seed=seed, arrival_s=0.0, pooling=pooling, adapter=adapter)
        request = LocalRequest(request_id, key, Work(asked, [], 0, [], deadlines or Deadlines()))
        self._requests[key] = self._by_id[request_id] = request
        self._waiting.append(request)
        return request

    def abort(self, request_id: RequestId) -> bool:
        """Ends a request in any state. Returns False if it has already ended."""
        request = self._by_id.pop(request_id, None)
        if request is None:
            return False
        del self._requests[request.key]
        if request in self._waiting:
            self._waiting.remove(request)
            self._free(request)
        else:
            self._offered.discard(request.key)
            self._leaving[request.key] = request
            self._order(Abort([request.key]))
        return True

    def reset(self) -> None:
        """Ends all requests, also after an exception in the middle of a step."""
        self._transfers.close()
        self.engine.reset()
        self._memory = None
        self._begin()

    def close(self) -> None:
        """Stops all threads. Safe to repeat."""
        self._transfers.close()

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    def check_idle(self) -> None:
        """Raises RuntimeError, with both numbers, if anything is left of finished requests."""
        self._settle()
        self._worker.check_idle()
        self.engine.check_idle()
        num_left = len(self._requests) + len(self._leaving) + len(self._waiting) + len(self._offered)
        num_used = self._memory.num_used if self._memory else 0
        if num_left or num_used:
            raise RuntimeError(f"idle, but {num_left} requests and {num_used} blocks of host memory are left")

    def _settle(self) -> None:
        """Waits until aborted requests have freed their blocks."""
        while self._leaving:
            self._iterate()

    # ---- iterations --------------------------------------------------------------------------------------------------

    def step(self) -> list[TokenOutput]:
        self._offer()
        outputs, goes_on = self._iterate()
        if not outputs and not goes_on and self._requests:
            self._wake.wait(WAIT_S)
        self._wake.clear()
        return outputs

    def _offer(self) -> None:
        most = OFFERED * self.engine.limits.max_num_seqs
        while self._waiting and len(self._offered) + len(self._leaving) < most:
            request = self._waiting.popleft()
            request.work = replace(request.work, era=self._era)
            self._offered.add(request.key)
            self._order(Offer([request.work], is_batch=False))

    def _iterate(self) -> tuple[list[TokenOutput], bool]:
        messages, goes_on = self._worker.step()
        outputs, self._worker.outputs = self._worker.outputs, []
        for message in messages:
            self._hear(message)
        return [output for output in outputs if self._has_taken(output)], goes_on

    def _has_taken(self, output: TokenOutput) -> bool:
        """Returns False if the request was aborted."""
        request = self._requests.get(RequestKey(int(output.request_id)))
        if request is None:
            return False
        output.request_id = request.request_id
        if output.token_id is not None:
            request.output.append(output.token_id)
        if output.finish_reason:
            del self._requests[request.key], self._by_id[request.request_id]
        return True

    def _hear(self, message: AnyMessage) -> None:
        match message:
            case DecodeReport():
                self._report(message)
            case Gone(keys=keys):
                for key in keys:
                    if request := self._leaving.pop(key, None):
                        self._free(request)
            case Failed(key=key) if request := self._requests.get(key):
                self._free(request)
                if message.what != "evict":
                    # The KV is lost and computed again.
                    self._come_back(request, 0)
            case Failed():
                pass
            case _:
                raise RuntimeError(f"{type(message).__name__}: a colocated instance does not send this")

    def reset_prefix_cache(self) -> None:
        """No further request gets KV that is kept now. A router does the same: see `PoolClient.distrust_all`."""
        self._era += 1
        self._order(ForgetAll(self._era))

    def _order(self, order: AnyMessage) -> None:
        """Gives the worker an order. The next iteration acts on it, and starts at once."""
        self._worker.on(order)
        self._wake.set()

    def _report(self, report: DecodeReport) -> None:
        for key in report.admitted:
            self._offered.discard(key)
            if request := self._requests.get(key):
                self._free(request)
        if any(news.is_spoilt for news in report.news):
            self.reset_prefix_cache()
        for news in report.news:
            if (request := self._requests.get(news.key)) and not news.first:
                request.num_found = news.num_reused
        self.num_drops += len(report.dropped)
        for key in report.dropped:
            if request := self._requests.get(key):
                self._come_back(request, 0)
        self.num_evictions += len(report.evicted)
        for key, num_tokens in report.evicted:
            if request := self._requests.get(key):
                self._come_back(request, num_tokens)
        ended = {news.key for news in report.news if news.finish_reason}
        for key in report.wants_evicted:
            if key not in ended and (request := self._requests.get(key)) and not request.blocks:
                self._evict(request)

    def _evict(self, request: LocalRequest) -> None:
        num_tokens = len(request.work.request.prompt) + len(request.output)
        if self._memory is None:
            self._memory = self._make_memory()
            self._transfers.use_pool(self._memory.blocks)
        request.blocks = self._memory.allocate(self.engine.format.num_columns(num_tokens))
        self._order(Evict(request.key, request.blocks, num_saved=0))

    def _come_back(self, request: LocalRequest, num_cached: int) -> None:
        """Offers a preempted request again, before requests that have not begun."""
        request.work = replace(
            request.work, output=[*request.output], num_cached=num_cached, blocks=[*request.blocks]
        )
        self._offered.add(request.key)
        self._order(Offer([request.work], is_batch=False))

    def _make_memory(self) -> SwapMemory:
        """Returns memory for all requests that can have begun: those in slots, and all offered ones.

        A policy may begin every offered request before a preempted one is admitted again.
        """
        form, limits = self.engine.format, self.engine.limits
        num_columns = limits.max_num_seqs * form.num_columns(self.engine.max_model_len)
        return SwapMemory((OFFERED + 1) * num_columns, self._pool_format.column_bytes)

    def _free(self, request: LocalRequest) -> None:
        """Frees a request's host memory. Safe to repeat."""
        if request.blocks and self._memory:
            self._memory.free(request.blocks)
        request.blocks = []
