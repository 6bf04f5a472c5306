"""Which pooled requests go to which decode instance, and when."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from alignedserve.messages import FindNear, FormBatch
from alignedserve.router.config import RouterConfig
from alignedserve.router.entry import Entry
from alignedserve.router.fleet import Fleet
from alignedserve.router.pooled import Pooled
from alignedserve.types import InstanceId


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

    def patience_s(self, fleet: Fleet, pooled: Pooled) -> float:
        """A pooled request should be admitted after so long. With more of them than decode instances can hold, all
        wait long, whatever the order: only beyond that does somebody starve."""
        capacity = sum(view.num_blocks * view.hello.limits.block_size for view in fleet.decodes)
        num_fills = pooled.num_tokens / capacity if capacity else 0.0
        return self.config.starvation_s * (1.0 + num_fills)

    @abstractmethod
    def decide(self, fleet: Fleet, pooled: Pooled, now: float) -> Sequence[FormBatch | FindNear | Assign]:
        """What to ask of the pool, or to offer."""
