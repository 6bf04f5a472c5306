"""The processes of an island that are up, and the speed of its instances. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from alignedserve.kv.format import is_lossy
from alignedserve.protocol.messages import Hello
from alignedserve.router.views import ColocatedView, DecodeView, PrefillView, Process
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.types import InstanceId

_VIEWS: dict[str, type[Process]] = {"prefill": PrefillView, "decode": DecodeView, "colocated": ColocatedView}


# The weight of a measurement in the average of `second_token_s` falls by a factor of e after this many more.
NUM_AVERAGED = 16


class ClusterState:
    def __init__(self, config: SchedulingConfig) -> None:
        self._config = config
        self._processes: dict[InstanceId, Process] = {}
        self.pool: Process | None = None
        # Instances that take prompts, and instances that take requests to decode, in order of connection.
        self.prefills: list[PrefillView | ColocatedView] = []
        self.decodes: list[DecodeView] = []
        # The same, with instances that take no new requests but still have some.
        self.all_decodes: list[DecodeView] = []
        # Whether the instances that decode also compute prompts.
        self.is_colocated = False
        # The largest context length among the instances, in tokens.
        self.max_model_len = 0
        # Whether requests pass KV, so that instances count a block for each request that holds it.
        self.has_window = False
        # Whether requests with a common prefix have its blocks in common in the pool.
        self.shares_pool_blocks = False
        # The same, and at all instances that decode.
        self.shares_all_blocks = False
        # Whether instances can load a prompt's prefix from the pool.
        self.loads_prefixes = False
        # The seconds from the first token to the second, on average over recent real time.
        self.second_token_s = 0.0

    def add(self, hello: Hello) -> Process:
        process = _VIEWS.get(hello.role, Process)(hello)
        process.num_free_blocks = hello.limits.num_blocks
        if hello.role == "kvpool":
            self.pool = process
        self._processes[hello.instance_id] = process
        self._sort()
        return process

    def remove(self, instance_id: InstanceId) -> Process | None:
        process = self._processes.pop(instance_id, None)
        if process is self.pool:
            self.pool = None
        self._sort()
        return process

    def drain(self, process: Process, is_draining: bool) -> None:
        """Sets whether the instance gets no new requests."""
        process.is_draining = is_draining
        self._sort()

    def _sort(self) -> None:
        taking = [process for process in self if not process.is_draining]
        self.prefills = [process for process in taking if isinstance(process, PrefillView | ColocatedView)]
        self.decodes = [process for process in taking if isinstance(process, DecodeView)]
        self.all_decodes = [process for process in self if isinstance(process, DecodeView)]
        self.is_colocated = any(isinstance(view, ColocatedView) for view in self.prefills)
        self.max_model_len = max((view.hello.limits.max_model_len for view in self.instances), default=0)
        self.has_window = self.pool is not None and self.pool.hello.limits.window > 0
        self.shares_pool_blocks = self._shares_pool_blocks()
        is_shared_there = all(view.hello.limits.enable_prefix_caching for view in self.decodes)
        self.shares_all_blocks = self.shares_pool_blocks and is_shared_there and not self.has_window
        # An instance loads whole blocks of KV, and a prompt may begin in parts of them, or keep its inputs.
        keeps_inputs = any(view.hello.limits.can_keep_inputs for view in self.prefills)
        self.loads_prefixes = not (keeps_inputs or self._config.share_blocks)

    def __contains__(self, instance_id: InstanceId) -> bool:
        return instance_id in self._processes

    def __iter__(self) -> Iterator[Process]:
        return iter(self._processes.values())

    @property
    def instances(self) -> list[Process]:
        """The processes that compute: neither the pool nor gateways."""
        return [process for process in self if isinstance(process, PrefillView | DecodeView)]

    def _shares_pool_blocks(self) -> bool:
        if self.pool is None or not (self.prefills and self.prefills[0].hello.limits.enable_prefix_caching):
            return False
        # With a window, saved columns may lack the blocks of sliding groups.
        are_whole = all(each.hello.limits.saves_whole for each in (self.pool, *self.prefills))
        is_exact = not is_lossy(self.pool.hello.fingerprint.get("encoding", ""))
        return is_exact and (are_whole or not self.has_window)

    def prefill(self, instance_id: InstanceId | None) -> PrefillView | None:
        process = self._processes.get(instance_id) if instance_id else None
        return process if isinstance(process, PrefillView) else None

    def decode(self, instance_id: InstanceId | None) -> DecodeView | None:
        process = self._processes.get(instance_id) if instance_id else None
        return process if isinstance(process, DecodeView) else None

    def computing(self, instance_id: InstanceId | None) -> PrefillView | ColocatedView | None:
        """Returns the instance if it computes prompts."""
        process = self._processes.get(instance_id) if instance_id else None
        return process if isinstance(process, PrefillView | ColocatedView) else None

    def note_second_token(self, seconds: float) -> None:
        self.second_token_s += (max(seconds, 0.0) - self.second_token_s) / NUM_AVERAGED

    # ---- speed of instances, in seconds; 0 if no instance has a cost model ----

    def fastest_ttft_s(self, num_tokens: int) -> float:
        """Returns how long a prompt takes that has the fastest instance to itself."""
        known = [(view.hello.cost, view.hello.limits.max_num_batched_tokens) for view in self.prefills]
        return min((cost.fastest_ttft_s(num_tokens, chunk) for cost, chunk in known if cost), default=0.0)

    def fastest_tbt_s(self, num_tokens: int) -> float:
        """Returns how long the token after `num_tokens` takes, for a request that has the fastest instance to
        itself."""
        known = [view.hello.cost for view in self.decodes]
        return min((cost.fastest_tbt_s(num_tokens) for cost in known if cost), default=0.0)

    def prefill_s(self, num_cached: int, num_tokens: int) -> float:
        """Returns how long the rest of a prompt takes, after `num_cached` tokens, at the fastest instance's recent
        pace."""
        found = []
        for view in self.prefills:
            if cost := view.hello.cost:
                chunk = view.hello.limits.max_num_batched_tokens
                all_s = cost.fastest_ttft_s(num_tokens, chunk)
                found.append((all_s - cost.fastest_ttft_s(num_cached, chunk)) * view.pace)
        return min(found, default=0.0)

    def prompt_tokens_per_s(self) -> float:
        """Returns how many prompt tokens per second an instance computes, at the fastest instance's recent pace."""
        chunk = max((view.hello.limits.max_num_batched_tokens for view in self.prefills), default=0)
        seconds = self.prefill_s(0, chunk)
        return chunk / seconds if seconds else 0.0

    def decode_s(self, num_tokens: int) -> float:
        """Returns how long the token after `num_tokens` takes, at the fastest instance's recent pace."""
        costs = [(view.hello.cost, view.pace) for view in self.decodes]
        return min((cost.fastest_tbt_s(num_tokens) * pace for cost, pace in costs if cost), default=0.0)
