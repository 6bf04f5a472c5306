"""Measures the benefit of batches with similar lengths: policies `aligned` and `fcfs` in simulation, by a cost model.

    python -m benchmarks.simulation --trace AzureLLMInferenceTrace_conv.csv --long-prompts arxiv_summarization_stats.csv

- goodput: the highest rate at which 90 % of requests meet the SLO (first token in 1 s, 0.1 s per token)
- saturation: decode throughput under far more load than can be decoded, with ample prefill instances, until the last
  request is admitted
- knobs: saturation on the trace alone, with one setting changed at a time

Each runs with three kernels for decode attention (timing/cost.py), which differ in the cost of unequal lengths. For
your own traffic and cluster, use `alignedserve simulate`.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import get_args

from alignedserve.cli.simulate.goodput import find_goodput
from alignedserve.router.config import RouterConfig
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.sim.scenario import Scenario
from alignedserve.sim.trace import Arrival, Lengths, cut, poisson_arrivals, read_azure_trace, scale_rate
from alignedserve.timing.cost import Attention
from alignedserve.timing.cost_presets import load_cost_model
from benchmarks.harness import JSON_FILE, facts, parser_of, progress, say, write_json

KERNELS: tuple[Attention, ...] = get_args(Attention)
POLICIES = ("fcfs", "aligned")
# 800 GB of host memory, like the paper's server.
POOL_BYTES = 800e9
MAX_MODEL_LEN = 16_384
# (prefill instances, decode instances) for goodput.
ISLANDS = ((1, 1), (2, 1), (8, 4))
# Requests per second that no instance can decode.
SATURATING_RATE = 20.0
NUM_SATURATING_PREFILLS = 4
NEVER_S = 1e9

Record = dict[str, object]


@dataclass(frozen=True)
class Setting:
    kernel: Attention
    policy: str
    num_prefill: int
    num_decode: int = 1
    link: str = "nccl"
    # Changed fields of SchedulingConfig.
    knobs: tuple[tuple[str, object], ...] = ()

    def scenario(self, cost: str) -> Scenario:
        scheduling: dict[str, object] = {"policy": self.policy} | dict(self.knobs)
        return Scenario(
            load_cost_model(cost).with_attention(self.kernel),
            RouterConfig(link=self.link),
            num_prefill=self.num_prefill,
            num_decode=self.num_decode,
            pool_bytes=POOL_BYTES,
            max_model_len=MAX_MODEL_LEN,
            scheduling=SchedulingConfig(**scheduling),  # type: ignore[arg-type]
            is_checked=False,
        )


def with_long_prompts(workload: list[Arrival], path: Path, share: float) -> list[Arrival]:
    """Replaces the lengths of a random share of the requests by those in the file: num_prefill_tokens,
    num_decode_tokens."""
    dice = random.Random(1)
    with path.open(newline="") as file:
        rows = [
            Lengths(int(row["num_prefill_tokens"]), int(row["num_decode_tokens"]))
            for row in csv.DictReader(file)
        ]
    fitting = [each for each in rows if each.prompt + each.output <= MAX_MODEL_LEN]
    return [
        replace(arrival, lengths=dice.choice(fitting)) if dice.random() < share else arrival
        for arrival in workload
    ]


def short_and_long(num_requests: int, share_of_long: float) -> list[Arrival]:
    """The paper's synthetic workload: prompts of less than a thousand tokens, and some of one to eight thousand."""
    dice = random.Random(1)

    def lengths() -> Lengths:
        is_long = dice.random() < share_of_long
        return Lengths(dice.randint(1000, 8000) if is_long else dice.randint(16, 999), dice.randint(50, 350))

    return poisson_arrivals([lengths() for _ in range(num_requests)], rate=1.0, seed=1)


def measure_goodput(cost: str, workload: list[Arrival]) -> Iterator[Record]:
    for num_prefill, num_decode in ISLANDS:
        for kernel in KERNELS:
            for policy in POLICIES:
                scenario = Setting(kernel, policy, num_prefill, num_decode).scenario(cost)

                def attainment(rate: float, scenario: Scenario = scenario) -> float:
                    return scenario.run(scale_rate(workload, rate)).attainment

                found = find_goodput(attainment, first_rate=0.8 * num_decode, precision=0.02)
                yield {
                    "study": "goodput",
                    "kernel": kernel,
                    "policy": policy,
                    "num_prefill": num_prefill,
                    "num_decode": num_decode,
                    "requests_per_s": found.rate,
                    "tried": found.tried,
                }


def measure_saturation(cost: str, workloads: dict[str, list[Arrival]]) -> Iterator[Record]:
    for name, workload in workloads.items():
        for kernel in KERNELS:
            for policy in POLICIES:
                setting = Setting(kernel, policy, NUM_SATURATING_PREFILLS)
                yield {"study": "saturation", "workload": name} | saturate(cost, setting, workload)


def measure_knobs(cost: str, workload: list[Arrival]) -> Iterator[Record]:
    changes: dict[str, Callable[[Setting], Setting]] = {"as it is": lambda setting: setting}
    knobs: list[tuple[str, object]] = [
        ("min_batch_requests", 1),
        ("min_batch_requests", 128),
        ("batch_share", 0.2),
        ("batch_share", 0.8),
        ("starvation_s", NEVER_S),
        ("fill_mark", 0.8),
    ]
    for name, value in knobs:
        changes[f"{name}={value}"] = partial(replace, knobs=((name, value),))
    changes["link=host"] = partial(replace, link="host")
    for name, change in changes.items():
        for kernel in KERNELS[1:]:
            setting = change(Setting(kernel, "aligned", NUM_SATURATING_PREFILLS))
            yield {"study": "knobs", "change": name} | saturate(cost, setting, workload)


def saturate(cost: str, setting: Setting, workload: list[Arrival]) -> Record:
    report = setting.scenario(cost).run(scale_rate(workload, SATURATING_RATE))
    return {
        "kernel": setting.kernel,
        "policy": setting.policy,
        "num_prefill": setting.num_prefill,
        "num_decode": setting.num_decode,
        "report": report.as_dict(),
    }


def line(record: Record) -> str:
    what = [str(value) for value in record.values() if isinstance(value, str | int)]
    report = record.get("report")
    if not isinstance(report, dict):
        return f"{' '.join(what):60} {record['requests_per_s']:.2f} requests/s"
    return (
        f"{' '.join(what):60} {report['loaded_tokens_per_busy_s']:7.1f} tokens/s  "
        f"{report['mean_iteration_s'] * 1e3:6.1f} ms  batch {report['mean_batch']:5.1f}  "
        f"max/mean {report['max_over_mean_length']:.2f}"
    )


def main() -> None:
    parser = parser_of(__doc__, out=JSON_FILE)
    parser.add_argument("--trace", type=Path, required=True, help="trace in Azure's format")
    parser.add_argument(
        "--long-prompts", type=Path, help="file with lengths of long prompts and their summaries"
    )
    parser.add_argument("--cost", default="opt-13b/a100-80gb", help="name or file of a cost model")
    parser.add_argument("--requests", type=int, default=1000)
    options = parser.parse_args()
    trace = cut(read_azure_trace(options.trace), options.requests)
    workloads = {"trace": trace}
    if options.long_prompts:
        workloads["trace, 10 % long prompts"] = with_long_prompts(trace, options.long_prompts, 0.1)
    workloads["95 % short, 5 % long"] = short_and_long(options.requests, 0.05)
    records: list[Record] = []
    studies = {
        "saturation": measure_saturation(options.cost, workloads),
        "goodput": measure_goodput(options.cost, trace),
        "knobs": measure_knobs(options.cost, trace),
    }
    with progress(None, "setting") as bar:
        for name, study in studies.items():
            bar.set_description(name)
            for record in study:
                bar.update()
                say(line(record))
                records.append(record)
    settings = {"cost": options.cost, "num_requests": options.requests, "pool_bytes": POOL_BYTES}
    write_json(options.out, facts() | {"settings": settings, "records": records})


if __name__ == "__main__":
    main()
