"""Simulates a trace in Mooncake's format, with prefix caching and without, beside what a cache without end would find.

    python -m benchmarks.mooncake TRACE [--instances 4+4] [--pool-gb 512] [--num-prompts N] [--cost NAME]

The share found is that of prompt tokens with KV that was already there. A cache without end finds every piece of a
prompt that an earlier prompt in the trace had, even if that one still waits.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from alignedserve.router.config import RouterConfig
from alignedserve.sim.jsonl_trace import read_trace
from alignedserve.sim.model import TOKENS_PER_ID
from alignedserve.sim.scenario import Ran, Scenario
from alignedserve.sim.trace import Arrival
from alignedserve.timing.cost_presets import load_cost_model

MAX_MODEL_LEN = 131_072


def most(workload: Sequence[Arrival]) -> float:
    """Returns the share of prompt tokens that a cache without end finds. The last token is always computed."""
    seen: set[tuple[int, ...]] = set()
    num_found = num_all = 0
    for arrival in workload:
        num_known, length = 0, arrival.lengths.prompt
        ids = arrival.hash_ids
        for end in range(1, len(ids) + 1):
            if ids[end - 1 : end] not in seen:
                break
            num_known = end
        seen.update((each,) for each in ids)
        num_found += min(num_known * TOKENS_PER_ID, length - 1)
        num_all += length
    return num_found / num_all


def line_of(name: str, ran: Ran) -> str:
    streams = [stream for stream in ran.streams if stream.times_s]
    ttfts_s = sorted(stream.times_s[0] - stream.request.arrival_s for stream in streams)
    num_found = sum(stream.num_reused for stream in streams)
    share = num_found / sum(len(stream.request.prompt) for stream in streams)
    return (
        f"{name:24} found {100 * share:5.1f} % of prompt tokens; TTFT p50 {ttfts_s[len(ttfts_s) // 2]:.2f} s, "
        f"p99 {ttfts_s[int(0.99 * len(ttfts_s))]:.2f} s; {len(streams)} requests"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
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
            print(
                f"{len(fitting)} requests; a cache without end finds {100 * most(fitting):.1f} %", flush=True
            )
        ran = scenario.simulate(fitting)
        print(line_of("with prefix caching" if enable_prefix_caching else "without", ran), flush=True)


if __name__ == "__main__":
    main()
