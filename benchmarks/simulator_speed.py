"""Measures the processor time of `alignedserve simulate` on fixed scenarios, under each policy.

    python -m benchmarks.simulator_speed [--policy NAME ...] [--scenario NAME ...] [--requests 200]
    python -m benchmarks.simulator_speed --against CHECKOUT [--rounds 2]

Each line has a digest of the run: the time of each of the router's events with the kinds of its messages, each token
with its time, and the figures in `FIGURES`. A change that only affects speed leaves the digest unchanged. Other content
of messages is not included.

`--against` also runs this file with the modules of another checkout, in turn. It prints the ratio of the speeds, and
fails if a digest differs. The other checkout need not have this command.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path

import msgspec

from alignedserve.cli.simulate.compare import Comparison
from alignedserve.cli.simulate.config import SimConfig
from alignedserve.cli.simulate.trial import Trial, TrialOutcome
from alignedserve.engine.config import EngineConfig
from alignedserve.router.config import RouterConfig
from alignedserve.router.events import Event, Received, Send
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies import POLICIES
from alignedserve.sim.gateway import Stream
from alignedserve.timing.cost_presets import load_cost_model
from alignedserve.types import InstanceId

_TRAFFIC = SimConfig(input_len=600, output_len=150, spread=2.2, seed=7)
_BACKLOG = {"be_backlog": 32, "be_input_len": 600.0, "be_output_len": 150.0, "warmup_s": 10.0}
_ISLANDS: dict[str, dict[str, object]] = {
    "1 colocated": {"colocated_instances": (1,), "request_rate": 3.0},
    "4 colocated": {"colocated_instances": (4,), "request_rate": 12.0},
    "1 + 1": {"prefill_instances": (1,), "decode_instances": (1,), "request_rate": 3.0},
}
SCENARIOS = {
    name + suffix: island | backlog
    for suffix, backlog in (("", {}), (", backlog", _BACKLOG))
    for name, island in _ISLANDS.items()
}
# Figures of `TrialOutcome`. The other checkout's may have more.
FIGURES = (
    *("num_be_complete", "num_refused", "num_open", "prefill_busy", "mean_batch", "num_batches", "mixed"),
    *("scheduled_soon", "pool_peak", "window_s"),
    *("mixture.num_evicted", "mixture.num_dropped", "mixture.num_sat_out", "mixture.num_interrupted"),
    *("mixture.moved_bytes", "mixture.overwritten_bytes", "mixture.num_computed", "mixture.num_needed"),
    *("mixture.busy", "mixture.rt.attainment", "mixture.rt.tokens_per_s", "mixture.be.tokens_per_s"),
)
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Run:
    scenario: str
    policy: str
    # Seconds of processor time.
    cpu_s: float
    num_tokens: int
    # A hash of the run.
    digest: str


class Events:
    """An observer of the router."""

    def __init__(self) -> None:
        # Per event: its time and kind, its message's kind and sender, and the receivers and kinds of the messages sent.
        self.seen: list[tuple[float, str, str, str, list[tuple[InstanceId, str]]]] = []

    def __call__(self, now: float, event: Event, sends: list[Send]) -> None:
        sender, received = "", ""
        if isinstance(event, Received):
            sender, received = event.sender, type(event.message).__name__
        sent = [(send.to, type(send.message).__name__) for send in sends]
        self.seen.append((now, type(event).__name__, received, sender, sent))


def measure(scenario: str, policy: str, num_requests: int) -> Run:
    changes = SCENARIOS[scenario] | {"policy": (policy,), "num_prompts": num_requests}
    config = replace(_TRAFFIC, **changes)  # type: ignore[arg-type]
    comparison = Comparison(
        config,
        load_cost_model(config.cost),
        EngineConfig("simulated"),
        RouterConfig(),
        SchedulingConfig(policy=policy, be_share=config.be_min_share),
    )
    events, begun_s = Events(), time.process_time()
    trial = Trial(comparison.scenarios[0], comparison.workload, told=lambda: None)
    trial._island.router.observers.append(events)
    outcome = trial.run()
    cpu_s = time.process_time() - begun_s
    streams = trial._island.streams
    num_tokens = sum(len(each.times_s) for each in streams)
    return Run(scenario, policy, cpu_s, num_tokens, digest(events, streams, outcome))


def digest(events: Events, streams: Sequence[Stream], outcome: TrialOutcome) -> str:
    answers = [(each.request.key, each.tokens, each.times_s, each.outcome, each.ended_s) for each in streams]
    links = [(each.name, each.busy, each.slowing, each.num_bytes) for each in outcome.links]
    figures = [attrgetter(name)(outcome) for name in FIGURES]
    found = msgspec.json.encode((events.seen, answers, links, figures))
    return hashlib.sha256(found).hexdigest()[:16]


def measure_in(checkout: Path, scenario: str, policies: Sequence[str], num_requests: int) -> list[Run]:
    """Runs this file in its own process, with the checkout's modules."""
    # With -P, modules are not looked up in this file's folder.
    command = [sys.executable, "-P", __file__, "--as-json"]
    command += ["--scenario", scenario, "--requests", str(num_requests)]
    command += [f"--policy={policy}" for policy in policies]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [Run(**json.loads(line)) for line in done.stdout.splitlines()]


def compare(
    other: Path, scenarios: Sequence[str], policies: Sequence[str], num_requests: int, rounds: int
) -> bool:
    """Prints the least time of all rounds for each checkout. Returns whether all digests are equal."""
    totals_s, are_equal = [0.0, 0.0], True
    for scenario in scenarios:
        turns = [
            [measure_in(each, scenario, policies, num_requests) for each in (other, ROOT)]
            for _ in range(rounds)
        ]
        for index, policy in enumerate(policies):
            of_policy = [[runs[index] for runs in turn] for turn in turns]
            before_s, now_s = (min(run.cpu_s for run in runs) for runs in zip(*of_policy, strict=True))
            is_equal = len({run.digest for turn in of_policy for run in turn}) == 1
            are_equal &= is_equal
            totals_s = [totals_s[0] + before_s, totals_s[1] + now_s]
            verdict = "equal" if is_equal else "OTHER FIGURES"
            print(
                f"{scenario:22} {policy:10} {before_s:7.2f} s {now_s:7.2f} s {before_s / now_s:6.2f} times as "
                f"fast  {of_policy[0][1].num_tokens:8} tokens  {verdict}",
                flush=True,
            )
    print(
        f"{'all':33} {totals_s[0]:7.2f} s {totals_s[1]:7.2f} s {totals_s[0] / totals_s[1]:6.2f} times as fast"
    )
    return are_equal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--policy",
        action="append",
        choices=[*POLICIES],
        help="policy to run; repeat for several [default: all]",
    )
    parser.add_argument(
        "--scenario",
        action="append",
        choices=[*SCENARIOS],
        help="scenario to run; repeat for several [default: all]",
    )
    parser.add_argument(
        "--requests", type=int, default=200, help="requests per scenario, without its backlog"
    )
    parser.add_argument("--against", type=Path, help="directory of another checkout")
    parser.add_argument("--rounds", type=int, default=2, help="rounds over both checkouts")
    parser.add_argument("--as-json", action="store_true", help="print a line of JSON per run")
    options = parser.parse_args()
    scenarios, policies = options.scenario or [*SCENARIOS], options.policy or [*POLICIES]
    if options.against:
        sys.exit(
            not compare(options.against.resolve(), scenarios, policies, options.requests, options.rounds)
        )
    for scenario in scenarios:
        total_s = 0.0
        for policy in policies:
            run = measure(scenario, policy, options.requests)
            total_s += run.cpu_s
            if options.as_json:
                print(json.dumps(asdict(run)))
            else:
                print(
                    f"{scenario:22} {policy:10} {run.cpu_s:7.2f} s  {run.num_tokens:8} tokens  {run.digest}",
                    flush=True,
                )
        if not options.as_json:
            print(f"{scenario:22} {'all':10} {total_s:7.2f} s")


if __name__ == "__main__":
    main()
