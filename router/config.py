"""What the router can be told. Frozen; the text beside a field is its help on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True)
class RouterConfig:
    policy: Annotated[
        str,
        "aligned (batches of similar length, deadlines), priority (real time first, then in order of arrival) "
        "or fcfs (in order of arrival)",
    ] = "aligned"
    link: Annotated[str, "how KV gets to decode instances: host, gloo or nccl"] = "host"
    max_num_queued_reqs: Annotated[
        int, "more than these wait for prefill: 503 (real time counts its own only)"
    ] = 4096
    max_num_queued_tokens: Annotated[int, "more tokens than these wait for prefill: 503 (likewise)"] = 4 << 20
    batch_share: Annotated[float, "of a decode instance's blocks that a candidate batch may fill"] = 0.4
    min_batch_requests: Annotated[int, "requests that a candidate batch should have"] = 36
    near_share: Annotated[float, "of a decode instance's blocks that candidate requests may fill"] = 0.1
    starvation_s: Annotated[
        float,
        "a pooled request is admitted after so long, and as long again for each decode memory that waits",
    ] = 2.0
    orphan_s: Annotated[float, "after a restart, pooled KV waits so long for its request"] = 10.0
    silence_s: Annotated[float, "a process that answers nothing for so long is taken for dead"] = 10.0
    prefill_window: Annotated[int, "iterations of work that a prefill instance has ahead"] = 2
