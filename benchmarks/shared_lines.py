"""Simulates a job of lines with common instructions, with a decode instance that shares their KV and one that does not.

    python -m benchmarks.shared_lines [--lines 200] [--common 1024] [--blocks 3000] [--pool-blocks 2000] [--link host]

Each line has `--common` tokens in common with all others, 64 of its own, and 128 of output. The island has a prefill
and a decode instance with the measured times of OPT-13B on an A100. The prefill instance shares prompts in both cases.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from statistics import fmean

from alignedserve.protocol.messages import DecodeReport, InstanceLimits
from alignedserve.router.config import RouterConfig
from alignedserve.router.events import Event, Received, Send
from alignedserve.sim.instance import SimDecode, SimInstance
from alignedserve.sim.island import IslandConfig, SimIsland
from alignedserve.sim.model import TOKENS_PER_ID, make_request, prompt_of
from alignedserve.timing.cost_presets import load_cost_model
from alignedserve.types import InstanceId

COST = load_cost_model("opt-13b/a100-80gb")
BLOCK_SIZE = 16
NUM_OWN, NUM_OUTPUT = 64, 128
LIMIT_S = 100_000.0


class Unshared(SimIsland):
    """Its decode instances hold a copy for each request."""

    def _decode(self, name: InstanceId) -> SimInstance:
        return SimDecode(self.world, name, self.config.decode, self._policy)


@dataclass
class Seen:
    """What the decode instance reports."""

    num_blocks: int
    in_use: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    num_bytes: int = 0
    num_evicted: int = 0

    def __call__(self, now: float, event: Event, sends: list[Send]) -> None:
        if not isinstance(event, Received) or not isinstance(report := event.message, DecodeReport):
            return
        if report.num_running:
            self.in_use.append(self.num_blocks - report.num_free_blocks)
            self.running.append(report.num_running)
        self.num_bytes += sum(moved.num_bytes for moved in report.moved if moved.what != "save")
        self.num_evicted += len(report.evicted)


def run(kind: type[SimIsland], args: argparse.Namespace) -> tuple[Seen, float]:
    length, num_lines = args.common + NUM_OWN, args.lines
    limits = InstanceLimits(args.blocks, BLOCK_SIZE, 256, 2048, max(4096, 2 * length))
    config = IslandConfig(
        COST,
        limits,
        limits,
        pool_blocks=args.pool_blocks or num_lines * (length + NUM_OUTPUT) // BLOCK_SIZE * 2,
        router=RouterConfig(link=args.link),
        enable_prefix_caching=True,
    )
    island, seen = kind(config), Seen(args.blocks)
    island.router.observers.append(seen)
    ids = range(args.common // TOKENS_PER_ID)
    island.submit(
        make_request(
            key=key,
            prompt_len=length,
            num_output_tokens=NUM_OUTPUT,
            arrival_s=0.0,
            tier="be",
            prompt=prompt_of(key, length, ids),
        )
        for key in range(1, num_lines + 1)
    )
    island.start()
    if not island.run_until_done(num_lines, LIMIT_S):
        raise RuntimeError(f"{island.num_open} of {num_lines} lines are still open")
    seconds = island.world.clock.now
    island.settle()
    island.check_idle()
    return seen, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lines", type=int, default=200)
    parser.add_argument("--common", type=int, default=2 * TOKENS_PER_ID, help="a multiple of 512")
    parser.add_argument(
        "--blocks", type=int, default=COST.num_kv_tokens // BLOCK_SIZE, help="KV blocks per instance"
    )
    parser.add_argument("--pool-blocks", type=int, default=0, help="0: twice what the lines need")
    parser.add_argument("--link", choices=("host", "ipc"), default="host")
    args = parser.parse_args()
    print(
        f"{args.lines} lines of {args.common} common tokens and {NUM_OWN} of their own, {args.blocks} blocks"
    )
    for name, kind in (("own copies", Unshared), ("shared", SimIsland)):
        seen, seconds = run(kind, args)
        print(
            f"{name:12} blocks in use: mean {fmean(seen.in_use):6.0f}, most {max(seen.in_use):5}; "
            f"running: mean {fmean(seen.running):5.1f}, most {max(seen.running):3}; "
            f"copied here: {seen.num_bytes / 1e9:6.2f} GB; evictions {seen.num_evicted:3}; "
            f"all done after {seconds:.1f} s"
        )


if __name__ == "__main__":
    main()
