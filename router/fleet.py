"""The processes of an island, as far as the router knows them: who is up, and counts of what they have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from alignedserve.messages import DecodeReport, Hello
from alignedserve.types import InstanceId, RequestKey


@dataclass(eq=False, slots=True)
class Process:
    hello: Hello
    num_free_blocks: int = 0

    @property
    def instance_id(self) -> InstanceId:
        return self.hello.instance_id


@dataclass(eq=False, slots=True)
class PrefillView(Process):
    # tokens of each request that it was given to compute and has not
    pending: dict[RequestKey, int] = field(default_factory=dict)
    # of those that it was given to stage, with blocks needed
    staging: dict[RequestKey, int] = field(default_factory=dict)

    @property
    def num_pending(self) -> int:
        return sum(self.pending.values())

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
    # since when it has a batch that it has not admitted entirely
    batch_since_s: float = 0.0
    # whether something of it was admitted
    is_batch_begun: bool = False
    # requests that run there
    running: dict[RequestKey, None] = field(default_factory=dict)
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

    def forget(self, key: RequestKey) -> None:
        """Safe to repeat."""
        self.batch.pop(key, None)
        self.near.pop(key, None)
        self.running.pop(key, None)


class Fleet:
    def __init__(self) -> None:
        self._processes: dict[InstanceId, Process] = {}
        self.pool: Process | None = None

    def add(self, hello: Hello) -> Process:
        kinds: dict[str, type[Process]] = {"prefill": PrefillView, "decode": DecodeView}
        process = kinds.get(hello.role, Process)(hello)
        process.num_free_blocks = hello.limits.num_blocks
        if hello.role == "kvpool":
            self.pool = process
        self._processes[hello.instance_id] = process
        return process

    def remove(self, instance_id: InstanceId) -> Process | None:
        process = self._processes.pop(instance_id, None)
        if process is self.pool:
            self.pool = None
        return process

    def __contains__(self, instance_id: InstanceId) -> bool:
        return instance_id in self._processes

    def __iter__(self) -> Iterator[Process]:
        return iter(self._processes.values())

    @property
    def prefills(self) -> list[PrefillView]:
        return [process for process in self if isinstance(process, PrefillView)]

    @property
    def decodes(self) -> list[DecodeView]:
        return [process for process in self if isinstance(process, DecodeView)]

    def prefill(self, instance_id: InstanceId | None) -> PrefillView | None:
        process = self._processes.get(instance_id) if instance_id else None
        return process if isinstance(process, PrefillView) else None

    def decode(self, instance_id: InstanceId | None) -> DecodeView | None:
        process = self._processes.get(instance_id) if instance_id else None
        return process if isinstance(process, DecodeView) else None
