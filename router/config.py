"""The router's settings. Frozen; the text beside a field is its help on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

LINKS = ("auto", "host", "ipc", "gloo", "nccl")
# The lowest and the highest allowed value.
_RANGES: dict[str, tuple[float, float]] = {
    "max_num_queued_reqs": (1, 2**31),
    "max_num_queued_tokens": (1, 2**63 - 1),
    "orphan_s": (0, 86400),
    "silence_s": (0.1, 86400),
}


@dataclass(frozen=True)
class RouterConfig:
    # The launch plan replaces "auto" (`transport/choose.py`), so a router never gets it.
    link: Annotated[
        str,
        "transport of KV to decode instances; auto is ipc between GPUs and host otherwise",
        LINKS,
        "instances",
    ] = "auto"
    max_num_queued_reqs: Annotated[
        int,
        "maximum requests waiting for prefill; more is a 503. Real time counts only itself. An API key may have as "
        "many as are then still free, so half at most; more is a 429",
        "limits",
    ] = 4096
    max_num_queued_tokens: Annotated[
        int,
        "maximum prompt tokens waiting for prefill; more is a 503. Real time counts only itself. An API key may have "
        "as many as are then still free, so half at most; more is a 429",
    ] = 4 << 20
    orphan_s: Annotated[
        float, "seconds that KV in the pool waits for its request after a restart", "expert"
    ] = 10.0
    silence_s: Annotated[
        float, "seconds without a heartbeat after which a process counts as dead", "operation"
    ] = 10.0
    change_roles: Annotated[
        bool, "let instances change between prefill and decode as traffic changes", "instances"
    ] = False

    def first_role(self, role: str) -> str | None:
        """Returns the first role of an instance that can change it; None for one that can't."""
        return role if self.change_roles else None

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high:  # NaN fails every comparison
                raise ValueError(f"{name}={value}: must be from {low} to {high}")
