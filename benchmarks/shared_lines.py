"""Simulates a job of lines with common instructions, with decode instances that share KV and with others that do not.

    python -m benchmarks.shared_lines [--lines 200] [--blocks 3000] [--pool-blocks 2000] [--link host]
    python -m benchmarks.shared_lines --prefill 2 --decode 2 --instructions 8 --common 512

Each line has `--common` common tokens, 64 of its own, and 128 of output. All are submitted at once, and lines with
different instructions take turns. The instances have the measured times of OPT-13B on an A100. Prefill instances share
prompts in both cases.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, field
from statistics import fmean

from alignedserve.protocol.messages import DecodeReport, InstanceLimits, PrefillReport
from alignedserve.router.config import RouterConfig
from alignedserve.router.events import Event, Received, Send
from alignedserve.sim.instance import SimDecode, SimInstance
from alignedserve.sim.island import IslandConfig, SimIsland
from alignedserve.sim.model import TOKENS_PER_ID, make_request, prompt_of
from alignedserve.timing.cost_presets import load_cost_model
from alignedserve.types import InstanceId
from benchmarks.harness import parser_of

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
    """What the instances report."""

    # The blocks of all decode instances together, and the free ones of each.
    num_blocks: int
    free: dict[InstanceId, int] = field(default_factory=dict)
    in_use: list[int] = field(default_factory=list)
    # The requests that each decode instance runs, and those of all.
    running_at: dict[InstanceId, int] = field(default_factory=dict)
    running: list[int] = field(default_factory=list)
    num_bytes: int = 0
    num_saved_bytes: int = 0
    num_computed: int = 0
    num_evicted: int = 0

    def __call__(self, now: float, event: Event, sends: list[Send]) -> None:
        if not isinstance(event, Received):
            return
        if isinstance(report := event.message, PrefillReport):
            self.num_computed += report.num_computed
            self.num_saved_bytes += sum(moved.num_bytes for moved in report.moved if moved.what == "save")
        elif isinstance(report, DecodeReport):
            self.free[event.sender] = report.num_free_blocks
            self.running_at[event.sender] = report.num_running
            if num_running := sum(self.running_at.values()):
                self.in_use.append(self.num_blocks - sum(self.free.values()))
                self.running.append(num_running)
            self.num_bytes += sum(moved.num_bytes for moved in report.moved if moved.what != "evict")
            self.num_evicted += len(report.evicted)


def run(kind: type[SimIsland], args: Namespace) -> tuple[Seen, int, float]:
    """Returns what the instances reported, the most blocks that requests had in the pool, and the seconds."""
    num_ids = args.common // TOKENS_PER_ID
    length = args.common + NUM_OWN
    limits = InstanceLimits(args.blocks, BLOCK_SIZE, 256, 2048, max(4096, 2 * length))
    config = IslandConfig(
        COST,
        prefill=limits,
        decode=limits,
        pool_blocks=args.pool_blocks or args.lines * (length + NUM_OUTPUT) // BLOCK_SIZE * 2,
        num_prefill=args.prefill,
        num_decode=args.decode,
        router=RouterConfig(link=args.link),
        enable_prefix_caching=True,
    )
    island, seen = kind(config), Seen(args.decode * args.blocks)
    seen.free |= {each.instance_id: args.blocks for each in island.decodes}
    most_pooled = 0

    def look(now: float, event: Event, sends: list[Send]) -> None:
        nonlocal most_pooled
        use = island.pool.core.use
        most_pooled = max(most_pooled, config.pool_blocks - use.num_free_blocks - use.num_kept_blocks)

    island.router.observers += [seen, look]
    island.submit(
        make_request(
            key=key,
            prompt_len=length,
            num_output_tokens=NUM_OUTPUT,
            arrival_s=0.0,
            tier="be",
            prompt=prompt_of(key, length, range(first := key % args.instructions * num_ids, first + num_ids)),
        )
        for key in range(1, args.lines + 1)
    )
    island.start()
    if not island.run_until_done(args.lines, LIMIT_S):
        raise RuntimeError(f"{island.num_open} of {args.lines} lines are still open")
    seconds = island.world.clock.now
    island.settle()
    island.check_idle()
    return seen, most_pooled, seconds


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--lines", type=int, default=200)
    parser.add_argument(
        "--blocks", type=int, default=COST.num_kv_tokens // BLOCK_SIZE, help="KV blocks per instance"
    )
    parser.add_argument("--pool-blocks", type=int, default=0, help="0: twice what the lines need")
    parser.add_argument("--link", choices=("host", "ipc"), default="host")
    parser.add_argument("--prefill", type=int, default=1, help="prefill instances")
    parser.add_argument("--decode", type=int, default=1, help="decode instances")
    parser.add_argument("--instructions", type=int, default=1, help="different beginnings")
    parser.add_argument(
        "--common", type=int, default=2 * TOKENS_PER_ID, help=f"tokens of each, a multiple of {TOKENS_PER_ID}"
    )
    args = parser.parse_args()
    print(
        f"{args.lines} lines of {args.common} common tokens and {NUM_OWN} of their own, {args.instructions} different "
        f"beginnings, {args.prefill} + {args.decode} instances of {args.blocks} blocks"
    )
    for name, kind in (("own copies", Unshared), ("shared", SimIsland)):
        seen, most_pooled, seconds = run(kind, args)
        print(
            f"{name:12} computed: {seen.num_computed:6} tokens; saved: {seen.num_saved_bytes / 1e9:6.2f} GB; "
            f"most in the pool: {most_pooled:5} blocks; "
            f"blocks in use: mean {fmean(seen.in_use):6.0f}, most {max(seen.in_use):5}; "
            f"running: mean {fmean(seen.running):5.1f}, most {max(seen.running):3}; "
            f"copied here: {seen.num_bytes / 1e9:6.2f} GB; evictions {seen.num_evicted:3}; "
            f"all done after {seconds:.1f} s"
        )


if __name__ == "__main__":
    main()
