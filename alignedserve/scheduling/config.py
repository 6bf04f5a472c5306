"""The configuration of a policy. Frozen; the text beside a field is its help on the command line.

All scheduling processes of an island have the same configuration: the router and the instances.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

# The lowest and the highest allowed value.
_RANGES: dict[str, tuple[float, float]] = {
    "batch_share": (0.001, 1),
    "min_batch_requests": (1, 65536),
    "near_share": (0.001, 1),
    "starvation_s": (0, 86400),
    "prefill_window": (1, 1024),
    "evict_ahead": (1, 1024),
    "admit_ahead": (1, 65536),
    "fill_mark": (0.001, 1),
    "rt_stretch": (0, 1000),
}


# What happens to requests that a decode or colocated instance preempts:
#
# - swap: KV goes to the pool.
# - recompute: KV is dropped and computed again.
# - defer: none leaves so that others can begin. Those that run out of blocks leave with their KV.
PREEMPTION_MODES = ("swap", "recompute", "defer")


@dataclass(frozen=True)
class SchedulingConfig:
    policy: Annotated[
        str,
        "scheduling policy: aligned, fcfs, sarathi or another one of docs/policies.md, or package.module:Class",
        "latency",
    ] = "aligned"
    prefill_window: Annotated[int, "iterations of work that a prefill instance has queued", "expert"] = 2
    batch_share: Annotated[float, "share of a decode instance's blocks that a candidate batch may fill"] = 0.4
    min_batch_requests: Annotated[int, "minimum requests of a candidate batch"] = 36
    near_share: Annotated[float, "share of a decode instance's blocks that candidate requests may fill"] = 0.1
    starvation_s: Annotated[
        float,
        "seconds after which a pooled request is admitted, and as many more per decode instance's worth of waiting KV",
    ] = 2.0
    be_share: Annotated[
        float, "minimum share of an instance's time for best effort, while any waits", "batch"
    ] = 0.05
    rt_headroom: Annotated[
        float, "share of blocks and slots that best effort leaves free for real time", "latency"
    ] = 0.05
    chunk_share: Annotated[
        float, "maximum duration of a best-effort chunk, as a share of the tightest TTFT objective"
    ] = 0.2
    be_pace: Annotated[
        float,
        "share of the peak throughput that satisfies best effort beside real time without objectives",
        "expert",
    ] = 0.7
    rt_stretch: Annotated[
        float,
        "share by which best effort may lengthen iterations of real time without objectives",
    ] = 0.2
    preemption_mode: Annotated[
        str,
        "KV of preempted requests: swap moves it to the pool, recompute drops it; with defer, new requests wait",
        PREEMPTION_MODES,
        "memory",
    ] = "swap"
    share_blocks: Annotated[
        bool,
        "on colocated instances, let real time use the free ends of best-effort blocks, and save only what it "
        "overwrites; needs a policy such as bros",
    ] = False
    admit_ahead: Annotated[
        int | None,
        "iterations of all requests for which admission leaves blocks [default: vLLM's watermark]",
        "expert",
    ] = None
    # These two have no flag: their values were found by trial, and tests use others.
    # Iterations before blocks run out at which requests are evicted.
    evict_ahead: int = 4
    # Share of the blocks: the candidate batch is admitted while fewer are in use.
    fill_mark: float = 1.0

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:  # NaN fails every comparison.
                raise ValueError(f"{name}={value}: must be from {low} to {high}")
        if self.admit_ahead is not None and self.admit_ahead < self.evict_ahead:
            raise ValueError(
                f"admit_ahead={self.admit_ahead}: must be at least {self.evict_ahead}: requests are evicted that many "
                "iterations ahead, and others would be admitted and evicted at once"
            )
        if self.preemption_mode not in PREEMPTION_MODES:
            modes = ", ".join(PREEMPTION_MODES)
            raise ValueError(f"preemption_mode={self.preemption_mode!r}: must be one of {modes}")
        for name in ("be_share", "rt_headroom", "chunk_share", "be_pace"):
            value, may_be_0 = getattr(self, name), name in ("be_share", "rt_headroom")
            if not (0 <= value < 1 and (value or may_be_0)):
                raise ValueError(f"{name}={value}: must be in {'[' if may_be_0 else '('}0, 1)")

    def is_alone(self, tier: str) -> bool:
        """Whether requests of this tier share no KV: their blocks are reversed, which hashes do not show."""
        return self.share_blocks and tier == "be"

    def check_share_blocks(self, is_colocated: bool, pool_kv_dtype: str) -> None:
        """Raises ValueError if `share_blocks` is set where blocks can't be shared."""
        if self.share_blocks and not is_colocated:
            raise ValueError(
                "share_blocks=True: prefill and decode instances can't; give --colocated-instances"
            )
        if self.share_blocks and pool_kv_dtype != "auto":
            # The bounds cover a block's first tokens, which would include another request's.
            raise ValueError(f"share_blocks=True and pool_kv_dtype={pool_kv_dtype!r}: must be auto then")
