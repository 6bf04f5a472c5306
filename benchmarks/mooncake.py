"""Simulates a trace in Mooncake's format, with prefix caching and without, beside what a cache could find at most.

    python -m benchmarks.mooncake TRACE [--instances 4+4] [--pool-gb 512] [--num-prompts N] [--cost NAME]

The share found is that of prompt tokens with KV that was already there. The caches beside it find what an earlier
prompt of the trace had, even if that one still waits. One has the pool's size and drops what was least recently used,
and the other one has no end.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from alignedserve.router.config import RouterConfig
from alignedserve.sim.jsonl_trace import read_trace
from alignedserve.sim.model import TOKENS_PER_ID
from alignedserve.sim.scenario import Ran, Scenario
from alignedserve.sim.trace import Arrival
from alignedserve.timing.cost_presets import load_cost_model
from benchmarks.harness import parser_of

MAX_MODEL_LEN = 131_072


def found_by_lru(workload: Sequence[Arrival], num_ids: float) -> float:
    """Returns the share of prompt tokens that a cache of `num_ids` pieces finds, which drops the least recently used
    ones, and of a prompt its end first. The last token is always computed."""
    cache: OrderedDict[int, None] = OrderedDict()
    num_found = num_all = 0
    for arrival in workload:
        length, ids = arrival.lengths.prompt, arrival.hash_ids
        num_known = sum(1 for _ in takewhile(cache.__contains__, ids))
        num_found += min(num_known * TOKENS_PER_ID, length - 1)
        num_all += length
        for each in reversed(ids):
            cache[each] = None
            cache.move_to_end(each)
        while len(cache) > num_ids:
            cache.popitem(last=False)
    return num_found / num_all


def line_of(name: str, ran: Ran, took_s: float) -> str:
    streams = [stream for stream in ran.streams if stream.times_s]
    ttfts_s = sorted(stream.times_s[0] - stream.request.arrival_s for stream in streams)
    num_found = sum(stream.num_reused for stream in streams)
    share = num_found / sum(len(stream.request.prompt) for stream in streams)
    return (
        f"{name:24} found {100 * share:5.1f} % of prompt tokens; TTFT p50 {ttfts_s[len(ttfts_s) // 2]:.2f} s, "
        f"p99 {ttfts_s[int(0.99 * len(ttfts_s))]:.2f} s; {len(streams)} requests; "
        f"simulated in {took_s:.0f} s of processor time"
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--instances", default="4+4", help="prefill and decode instances")
    parser.add_argument("--pool-gb", type=float, default=512.0)
    parser.add_argument("--num-prompts", type=int, help="only the first ones")
    parser.add_argument("--cost", default="qwen3-30b-a3b/h200")
    args = parser.parse_args()
    workload = read_trace(args.trace)[: args.num_prompts]
    num_prefill, num_decode = map(int, args.instances.split("+"))
    for enable_prefix_caching in (True, False):
        scenario = Scenario(
            load_cost_model(args.cost),
            RouterConfig(link="host"),
            num_prefill=num_prefill,
            num_decode=num_decode,
            pool_bytes=1e9 * args.pool_gb,
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_caching=enable_prefix_caching,
            is_checked=False,
        )
        fitting = [arrival for arrival in workload if scenario.fits(arrival.lengths)]
        if enable_prefix_caching:
            num_ids = scenario.pool_bytes / scenario.cost.kv_bytes_per_token / TOKENS_PER_ID
            print(
                f"{len(fitting)} requests; a cache of the pool's size finds "
                f"{100 * found_by_lru(fitting, num_ids):.1f} % of prompt tokens, and one without end "
                f"{100 * found_by_lru(fitting, math.inf):.1f} %",
                flush=True,
            )
        began_s = time.process_time()
        ran = scenario.simulate(fitting)
        took_s = time.process_time() - began_s
        print(line_of("with prefix caching" if enable_prefix_caching else "without", ran, took_s), flush=True)


if __name__ == "__main__":
    main()
