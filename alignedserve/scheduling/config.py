"""The configuration of a policy. It is frozen; the text beside a field is its help on the command line.

Every process of an island that schedules has the same one: the router and the instances.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

# The lowest and the highest value that is allowed.
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


# What becomes of requests that a decode or colocated instance preempts: KV goes to the pool, or is dropped and computed
# again; or none leaves so that others can begin, and those that can't go on leave with their KV.
PREEMPTION_MODES = ("swap", "recompute", "defer")


@dataclass(frozen=True)
class SchedulingConfig:
    policy: Annotated[str, "a name in docs/policies.md, or package.module:Class of your own"] = "aligned"
    prefill_window: Annotated[int, "iterations of work that a prefill instance has ahead"] = 2
    batch_share: Annotated[float, "of a decode instance's blocks that a candidate batch may fill"] = 0.4
    min_batch_requests: Annotated[int, "requests that a candidate batch should have"] = 36
    near_share: Annotated[float, "of a decode instance's blocks that candidate requests may fill"] = 0.1
    starvation_s: Annotated[
        float,
        "a pooled request is admitted after so long, and as long again for each decode memory that waits",
    ] = 2.0
    be_share: Annotated[
        float, "of an instance's time that best effort gets at least, while any of it waits"
    ] = 0.05
    rt_headroom: Annotated[float, "of blocks and slots that best effort leaves free for real time"] = 0.05
    chunk_share: Annotated[float, "of the tightest TTFT objective that a best-effort chunk may take"] = 0.2
    be_pace: Annotated[
        float,
        "of the pace best effort could have, enough beside real time that comes in a moment or asked for no objective",
    ] = 0.7
    rt_stretch: Annotated[
        float,
        "by this share best effort lengthens iterations of real time that asked for no objective, if it has time",
    ] = 0.2
    preemption_mode: Annotated[
        str,
        "for who leaves a decode instance: swap (KV to the pool), recompute (KV is dropped), or defer (new ones wait)",
    ] = "swap"
    share_blocks: Annotated[
        bool,
        "on colocated instances real time uses what best effort leaves free in its blocks, and only what it "
        "overwrites there is saved; with policies that can",
    ] = False
    admit_ahead: Annotated[
        int | None,
        "admission leaves blocks for so many iterations of all requests [default: vLLM's watermark]",
    ] = None
    # No flag sets these two: their values were found by trial, and tests use others.
    # Requests are evicted so many iterations before blocks run out.
    evict_ahead: int = 4
    # A share of the blocks: the candidate batch is admitted while fewer are in use.
    fill_mark: float = 1.0

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:  # NaN fails every comparison.
                raise ValueError(f"{name}={value}: must be from {low} to {high}")
        if self.admit_ahead is not None and self.admit_ahead < self.evict_ahead:
            raise ValueError(
                f"admit_ahead={self.admit_ahead}: must be at least {self.evict_ahead}: requests are evicted so many "
                "iterations ahead, and others would be admitted and evicted at once"
            )
        if self.preemption_mode not in PREEMPTION_MODES:
            modes = ", ".join(PREEMPTION_MODES)
            raise ValueError(f"preemption_mode={self.preemption_mode!r}: must be one of {modes}")
        for name in ("be_share", "rt_headroom", "chunk_share", "be_pace"):
            value, may_be_0 = getattr(self, name), name in ("be_share", "rt_headroom")
            if not (0 <= value < 1 and (value or may_be_0)):
                raise ValueError(f"{name}={value}: must be {'from' if may_be_0 else 'above'} 0, below 1")

    def check_share_blocks(self, is_colocated: bool, pool_kv_dtype: str) -> None:
        """Raises ValueError if blocks are to be shared from both ends where they can't be."""
        if self.share_blocks and not is_colocated:
            raise ValueError(
                "share_blocks=True: prefill and decode instances can't; give --colocated-instances"
            )
        if self.share_blocks and pool_kv_dtype != "auto":
            # Bounds are taken over a block's first tokens, and those that are another request's would count.
            raise ValueError(f"share_blocks=True and pool_kv_dtype={pool_kv_dtype!r}: must be auto then")
