"""What the router can be told. Frozen; the text beside a field is its help on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

# The lowest and the highest value that is allowed.
_RANGES: dict[str, tuple[float, float]] = {
    "max_num_queued_reqs": (1, 2**31),
    "max_num_queued_tokens": (1, 2**63 - 1),
    "orphan_s": (0, 86400),
    "silence_s": (0.1, 86400),
}


@dataclass(frozen=True)
class RouterConfig:
    # The plan puts a name in the place of "auto" (`transport/choose.py`): a router is never told that.
    link: Annotated[
        str,
        "how KV gets to decode instances: host, ipc, gloo, nccl; or auto: ipc where instances have GPUs, else host",
    ] = "auto"
    max_num_queued_reqs: Annotated[
        int, "more than these wait for prefill: 503 (real time counts its own only)"
    ] = 4096
    max_num_queued_tokens: Annotated[int, "more tokens than these wait for prefill: 503 (likewise)"] = 4 << 20
    orphan_s: Annotated[float, "after a restart, pooled KV waits so long for its request"] = 10.0
    silence_s: Annotated[float, "a process that answers nothing for so long is taken for dead"] = 10.0
    change_roles: Annotated[
        bool, "instances change between prefill and decode while they run, as the traffic asks for"
    ] = False

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high:  # NaN fails every comparison
                raise ValueError(f"{name}={value}: must be from {low} to {high}")
