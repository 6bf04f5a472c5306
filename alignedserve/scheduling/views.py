"""What policies see of requests and of instances, wherever they decide."""

from __future__ import annotations

from typing import Protocol

from alignedserve.protocol.messages import InstanceLimits
from alignedserve.timing.deadlines import Deadlines
from alignedserve.types import RequestKey


class RequestView(Protocol):
    @property
    def key(self) -> RequestKey: ...

    @property
    def is_rt(self) -> bool: ...

    @property
    def deadlines(self) -> Deadlines: ...

    @property
    def num_tokens(self) -> int:
        """The number of tokens of its prompt and output."""

    @property
    def num_output(self) -> int: ...

    @property
    def num_blocks(self) -> int:
        """The number of its blocks at the instance, or in the pool, where each is a whole column."""


class BoundaryView(Protocol):
    """An instance between two iterations."""

    @property
    def limits(self) -> InstanceLimits: ...

    @property
    def now(self) -> float: ...

    @property
    def num_free_blocks(self) -> int: ...

    @property
    def num_free_slots(self) -> int: ...

    @property
    def num_blocks_to_come(self) -> int:
        """Blocks of requests that leave. They become free when the KV has been copied to the pool."""

    @property
    def num_tokens_left(self) -> int:
        """The number of tokens that the iteration may still compute."""
