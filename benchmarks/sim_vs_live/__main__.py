"""Measures the requested cases. Writes DIR/sim_vs_live.json after every case, and the page at the end."""

from __future__ import annotations

import os
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from alignedserve import demo
from alignedserve.scheduling.policies import POLICIES
from alignedserve.sim.report import quantiles
from alignedserve.sim.world import NO_OVERHEAD, Overhead
from alignedserve.text.tokenizer import Tokenizer
from benchmarks import sim_vs_live
from benchmarks.gpu.record import Record, Row
from benchmarks.harness import FOLDER, exit_on_sigterm, facts, parser_of, progress, say
from benchmarks.sim_vs_live.live import Live, Plan, measure
from benchmarks.sim_vs_live.model import DEMO, Served, larger
from benchmarks.sim_vs_live.page import line, write
from benchmarks.sim_vs_live.requests import alone, fixed_list
from benchmarks.sim_vs_live.simulated import simulate

# Requests before the counted ones: one at a time, and under the same load.
NUM_ALONE, NUM_WARMING = 15, 40
# Tokens of KV: plenty, and short.
PLENTY, SHORT = 1 << 15, 1280


@dataclass(frozen=True)
class Load:
    name: str
    # Requests per second; None: all at once.
    rate: float | None
    kv_bytes: int


def loads_of(model: Served) -> dict[str, Load]:
    moderate, high = model.rates
    plenty, short = PLENTY * model.kv_bytes_per_token, SHORT * model.kv_bytes_per_token
    found = (
        Load("moderate", moderate, plenty),
        Load("high", high, plenty),
        Load("short", high, short),
        Load("burst", None, short),
    )
    return {each.name: each for each in found}


def case(
    policy: str, load: Load, model: Served, num_requests: int, profile_s: float, tokenizer: Tokenizer
) -> Row:
    head: Row = {"policy": policy, "load": load.name, "rate": load.rate, "kv_bytes": load.kv_bytes}
    plan = Plan(
        alone(tokenizer, NUM_ALONE, model.apart_s, max(model.tbt_s)),
        fixed_list(tokenizer, load.rate, NUM_WARMING, model.tbt_s, seed=1),
        fixed_list(tokenizer, load.rate, num_requests, model.tbt_s, seed=0),
    )
    begun = os.getloadavg()[0]
    try:
        live = measure(policy, model, load.kv_bytes, profile_s, plan)
    except RuntimeError as error:
        return head | {"error": str(error)}
    return head | {"load_average": begun} | compared(policy, load, live, num_requests)


def compared(policy: str, load: Load, live: Live, count: int) -> Row:
    cost, found = live.profile.cost, {}
    for name, overhead in (("simulated", live.overhead), ("by_profile_alone", NO_OVERHEAD)):
        side = simulate(policy, cost, load.kv_bytes, overhead, live.arrivals, count)
        ratios, paired = live.side.figures.ratios(side.figures), live.side.paired(side)
        found[name] = {"figures": asdict(side.figures), "ratios": ratios, "paired": paired, **side.iterations}
    return {
        "processor": live.profile.facts["device"],
        "live": {"figures": asdict(live.side.figures), **live.side.iterations},
        "client": asdict(live.client),
        "overhead": summary(live.overhead),
        "profile_waited_share": live.profile.waited_share,
        "profile_errors": {name: error.median for name, error in live.profile.errors.items()},
        **found,
    }


def summary(overhead: Overhead) -> Row:
    """Returns the overhead without its values per iteration."""
    found = {"pace": overhead.pace, "outside_s": overhead.outside_s, "message_s": overhead.message_s}
    for name in ("overruns", "overruns_of_chunks"):
        ratios = getattr(overhead, name)
        found |= {f"{name}_p50": quantiles(ratios).p50, f"{name}_p99": quantiles(ratios).p99}
    return found


def rows_of(args: Namespace, model: Served) -> Iterator[Row]:
    tokenizer, loads = Tokenizer.from_directory(demo.MODEL_DIR), loads_of(model)
    for number in range(args.rounds):
        for policy in args.policies:
            for name in args.loads:
                found = case(policy, loads[name], model, args.requests, args.profile_s, tokenizer)
                yield {"round": number} | found


def main(arguments: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    exit_on_sigterm()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="sim-vs-live-", dir="/tmp") as folder:
        model = DEMO if args.model == DEMO.name else larger(Path(folder))
        name = "sim_vs_live" if model is DEMO else f"sim_vs_live_{model.name}"
        about = facts() | {"num_requests": args.requests, "model": model.name}
        record = Record(args.out / f"{name}.json", about)
        with progress(args.rounds * len(args.policies) * len(args.loads), "case") as bar:
            for row in rows_of(args, model):
                record.add(row)
                bar.update()
                say(line(row))
        write(record.path)


def _parser() -> ArgumentParser:
    parser = parser_of(sim_vs_live.__doc__, rounds=1, out=FOLDER | {"required": True})
    loads = ["moderate", "high", "short", "burst"]
    parser.add_argument("--policies", nargs="+", choices=[*POLICIES], default=[*POLICIES], metavar="NAME")
    parser.add_argument("--loads", nargs="+", choices=loads, default=loads, metavar="NAME")
    parser.add_argument("--model", choices=[DEMO.name, "larger"], default=DEMO.name)
    parser.add_argument("--requests", type=int, default=400, help="requests per case")
    parser.add_argument(
        "--profile-s", type=float, default=10.0, help="seconds for measuring the cost profile"
    )
    return parser


if __name__ == "__main__":
    main()
