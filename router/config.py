"""The router's settings. Frozen; the text beside a field is its help on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

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
        "how KV gets to decode instances: host, ipc, gloo, nccl; or auto: ipc where instances have GPUs, else host",
    ] = "auto"
    max_num_queued_reqs: Annotated[
        int, "requests that may wait for prefill; more get 503 (real time counts only real time)"
    ] = 4096
    max_num_queued_tokens: Annotated[int, "tokens that may wait for prefill; more get 503 (likewise)"] = (
        4 << 20
    )
    orphan_s: Annotated[float, "seconds that pooled KV waits for its request after a restart"] = 10.0
    silence_s: Annotated[float, "seconds without an answer after which a process counts as dead"] = 10.0
    change_roles: Annotated[
        bool, "instances change between prefill and decode while they run, to follow the traffic"
    ] = False

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high:  # NaN fails every comparison
                raise ValueError(f"{name}={value}: must be from {low} to {high}")
