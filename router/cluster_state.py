"""The processes of an island, as far as the router knows them: who is up, and counts of what they have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from alignedserve.protocol.messages import Coming, DecodeReport, Hello
from alignedserve.router.prefix_affinity import PrefixAffinity
from alignedserve.router.token_counts import TokenCounts
from alignedserve.types import InstanceId, RequestKey


@dataclass(eq=False, slots=True)
class Process:
    hello: Hello
    num_free_blocks: int = 0
    # of an instance's iterations, measured over predicted
    pace: float = 1.0

    @property
    def instance_id(self) -> InstanceId:
        return self.hello.instance_id


@dataclass(eq=False, slots=True)
class Prompts:
    """That an instance was given."""

    # tokens of each that it has not computed
    pending: TokenCounts
    prefix_affinity: PrefixAffinity


def _no_prompts(process: Process) -> Prompts:
    limits = process.hello.limits
    return Prompts(TokenCounts(), PrefixAffinity(limits.num_blocks * limits.block_size))


@dataclass(eq=False, slots=True)
class PrefillView(Process):
    prompts: Prompts = field(init=False)
    # of those that it was given to stage, with blocks needed
    staging: dict[RequestKey, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prompts = _no_prompts(self)

    @property
    def pending(self) -> TokenCounts:
        return self.prompts.pending

    @property
    def num_free_staging_blocks(self) -> int:
        return self.hello.limits.num_staging_blocks - sum(self.staging.values())


@dataclass(eq=False, slots=True)
class Search:
    """A question to the pool. What found nothing is asked again when there is something new to find."""

    is_asked: bool = False
    # what there was to find, when it was asked last, and when it last found nothing
    _asked_about: object = None
    _fruitless: object = None

    def is_due(self, about: object) -> bool:
        return not self.is_asked and self._fruitless != about

    def ask(self, about: object) -> None:
        self.is_asked, self._asked_about = True, about

    def answered(self, has_found: bool) -> None:
        self.is_asked = False
        self._fruitless = None if has_found else self._asked_about


@dataclass(eq=False, slots=True)
class DecodeView(Process):
    report: DecodeReport | None = None
    # what it was offered and has not admitted, with blocks needed
    batch: dict[RequestKey, int] = field(default_factory=dict)
    near: dict[RequestKey, int] = field(default_factory=dict)
    # of these, what best-effort requests were promised
    be_promised: dict[RequestKey, int] = field(default_factory=dict)
    # since when it has a batch that it has not admitted entirely
    batch_since_s: float = 0.0
    # whether something of it was admitted
    is_batch_begun: bool = False
    # real time that it will be offered in a moment: whether its first token is out; and what it was told of that
    coming: dict[RequestKey, bool] = field(default_factory=dict)
    told: Coming = field(default_factory=lambda: Coming(0, 0))
    # requests that run there
    running: dict[RequestKey, None] = field(default_factory=dict)
    be_running: dict[RequestKey, None] = field(default_factory=dict)
    # of those, victims that the pool had no room for
    refused: dict[RequestKey, None] = field(default_factory=dict)
    # when it last brought a token, or gave one of them up
    progress_s: float = 0.0
    batch_search: Search = field(default_factory=Search)
    near_search: Search = field(default_factory=Search)

    @property
    def num_blocks(self) -> int:
        return self.hello.limits.num_blocks

    @property
    def num_unspoken_blocks(self) -> int:
        """What is free, and not promised to a request that was offered."""
        return self.num_free_blocks - sum(self.batch.values()) - sum(self.near.values())

    @property
    def num_unspoken_slots(self) -> int:
        return self.hello.limits.max_num_seqs - len(self.running) - len(self.batch) - len(self.near)

    @property
    def num_blocks_for_rt(self) -> int:
        """What is free, or best effort can give, and not promised to real time."""
        num_be_blocks = self.report.num_be_blocks if self.report else 0
        return self.num_unspoken_blocks + sum(self.be_promised.values()) + num_be_blocks

    @property
    def num_slots_for_rt(self) -> int:
        return self.num_unspoken_slots + len(self.be_promised) + len(self.be_running)

    @property
    def num_rt(self) -> int:
        """Requests that run there, or are to."""
        return self.hello.limits.max_num_seqs - self.num_slots_for_rt

    @property
    def awaits_rt(self) -> bool:
        return len(self.be_promised) < len(self.batch) + len(self.near)

    @property
    def pending_coming(self) -> Coming | None:
        """What it has not been told."""
        num_ready = sum(self.coming.values())
        news = Coming(len(self.coming) - num_ready, num_ready)
        return None if news == self.told else news

    def forget(self, key: RequestKey) -> None:
        """Safe to repeat."""
        self.coming.pop(key, None)
        self.be_promised.pop(key, None)
        self.be_running.pop(key, None)
        self.batch.pop(key, None)
        self.near.pop(key, None)
        self.running.pop(key, None)


@dataclass(eq=False, slots=True)
class ColocatedView(DecodeView):
    """It computes prompts too."""

    prompts: Prompts = field(init=False)

    def __post_init__(self) -> None:
        self.prompts = _no_prompts(self)

    @property
    def pending(self) -> TokenCounts:
        return self.prompts.pending


class ClusterState:
    def __init__(self) -> None:
        self._processes: dict[InstanceId, Process] = {}
        self.pool: Process | None = None
        # those of them that compute, in the order in which they came, and how long the longest request may get there
        self.prefills: list[PrefillView | ColocatedView] = []
        self.decodes: list[DecodeView] = []
        self.max_model_len = 0

    def add(self, hello: Hello) -> Process:
        kinds: dict[str, type[Process]] = {
            "prefill": PrefillView,
            "decode": DecodeView,
            "colocated": ColocatedView,
        }
        process = kinds.get(hello.role, Process)(hello)
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

    def _sort(self) -> None:
        self.prefills = [process for process in self if isinstance(process, PrefillView | ColocatedView)]
        self.decodes = [process for process in self if isinstance(process, DecodeView)]
        self.max_model_len = max(
            (view.hello.limits.max_model_len for view in (*self.prefills, *self.decodes)), default=0
        )

    def __contains__(self, instance_id: InstanceId) -> bool:
        return instance_id in self._processes

    def __iter__(self) -> Iterator[Process]:
        return iter(self._processes.values())

    def fastest_ttft_s(self, num_tokens: int) -> float:
        """Of a prompt that has the best instance for itself, by its cost model; 0: nobody knows."""
        known = [(view.hello.cost, view.hello.limits.max_num_batched_tokens) for view in self.prefills]
        return min((cost.fastest_ttft_s(num_tokens, chunk) for cost, chunk in known if cost), default=0.0)

    def fastest_tbt_s(self, num_tokens: int) -> float:
        """Likewise, between two tokens after so many."""
        known = [view.hello.cost for view in self.decodes]
        return min((cost.fastest_tbt_s(num_tokens) for cost in known if cost), default=0.0)

    def prefill_s(self, num_cached: int, num_tokens: int) -> float:
        """What an instance takes for a prompt of which so much is there, as fast as it is of late."""
        found = []
        for view in self.prefills:
            if cost := view.hello.cost:
                chunk = view.hello.limits.max_num_batched_tokens
                all_s = cost.fastest_ttft_s(num_tokens, chunk)
                found.append((all_s - cost.fastest_ttft_s(num_cached, chunk)) * view.pace)
        return min(found, default=0.0)

    def decode_s(self, num_tokens: int) -> float:
        """Likewise, between two tokens after so many."""
        costs = [(view.hello.cost, view.pace) for view in self.decodes]
        return min((cost.fastest_tbt_s(num_tokens) * pace for cost, pace in costs if cost), default=0.0)

    def prefill(self, instance_id: InstanceId | None) -> PrefillView | None:
        process = self._processes.get(instance_id) if instance_id else None
        return process if isinstance(process, PrefillView) else None

    def computing(self, instance_id: InstanceId | None) -> PrefillView | ColocatedView | None:
        """One that computes prompts."""
        process = self._processes.get(instance_id) if instance_id else None
        return process if isinstance(process, PrefillView | ColocatedView) else None

    @property
    def instances(self) -> list[Process]:
        """Those of them that compute."""
        return [process for process in self if isinstance(process, PrefillView | DecodeView)]

    @property
    def is_colocated(self) -> bool:
        """Prompts are computed where requests decode."""
        return any(isinstance(view, ColocatedView) for view in self.prefills)

    def decode(self, instance_id: InstanceId | None) -> DecodeView | None:
        process = self._processes.get(instance_id) if instance_id else None
        return process if isinstance(process, DecodeView) else None
