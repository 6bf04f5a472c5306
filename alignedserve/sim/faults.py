"""The faults of messages and copies."""

from __future__ import annotations

from alignedserve.types import InstanceId, RequestKey


class NoFaults:
    """The faults of a world that has none."""

    def latency(self, process: InstanceId, is_up: bool) -> float | None:
        """Returns the seconds that the next message to the router (`is_up`) or from it takes; None: the usual."""
        return None

    def copy_share(self, what: str, key: RequestKey) -> float | None:
        """Returns the share of its bytes after which the next copy of a request fails; None: it succeeds."""
        return None

    def copy_slowdown(self, what: str) -> float:
        """Returns by which factor a copy of this kind that begins now is slower than its channel."""
        return 1.0
