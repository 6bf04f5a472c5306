"""Which pooled requests go to which decode instance, and when."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

from alignedserve.messages import FindNear, FormBatch
from alignedserve.types import InstanceId
from router.config import RouterConfig
from router.entry import Entry
from router.fleet import Fleet


@dataclass(frozen=True)
class Assign:
    """Offer these to a decode instance, as a batch to run next or beside the one that runs."""

    decode: InstanceId
    entries: Sequence[Entry]
    is_batch: bool


class BatchPolicy(ABC):
    name: ClassVar[str]
    # whether the pool's index is to hold pooled requests, for FormBatch and FindNear
    uses_index: ClassVar[bool]

    def __init__(self, config: RouterConfig) -> None:
        self.config = config

    def prefill_due_s(self, entry: Entry) -> float:
        """Prefill goes in this order."""
        return entry.request.arrival_s

    def admission_due_s(self, entry: Entry, now: float) -> float:
        """A pooled request should be admitted by then."""
        return now + self.config.starvation_s

    @abstractmethod
    def decide(
        self, fleet: Fleet, pooled: Collection[Entry], num_added: int, now: float
    ) -> Sequence[FormBatch | FindNear | Assign]:
        """What to ask of the pool, or to offer. `pooled`: all that wait in the pool, those that came first first.
        `num_added` counts additions to them."""
