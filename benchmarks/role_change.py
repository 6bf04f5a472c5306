"""Compares instances that change roles with fixed proportions and with colocated instances, in simulation.

    python -m benchmarks.role_change --conversations AzureLLMInferenceTrace_conv.csv [--seconds 300] [--out DIR]

It simulates OPT-13B on four A100s by its cost model. Conversations are from Azure's trace. Code is generated in bursts,
with the means of Azure's code traffic (2,139 tokens in, 26 out). "In turn" alternates conversations and code by the
minute. The objectives are 1 s to the first token and 0.1 s for each further one. Writes role_change.md and
role_change.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from alignedserve.router.config import RouterConfig
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.sim.report import Objectives, make_report
from alignedserve.sim.scenario import Scenario
from alignedserve.sim.trace import (
    Arrival,
    LognormalLengths,
    cut,
    gamma_arrivals,
    read_azure_trace,
    scale_rate,
)
from alignedserve.timing.cost_presets import load_cost_model
from benchmarks.harness import FOLDER, facts, parser_of, publish, say, table

COST = "opt-13b/a100-80gb"
MAX_MODEL_LEN = 8192
POOL_BYTES = 400e9
SLO = Objectives(ttft_s=1.0, tpot_s=0.1)
# Medians of lengths. The resulting means are Azure's.
CODE = LognormalLengths(1740, 18, spread=1.9, max_prompt=7000, max_output=500)
CODE_CV = 4.0
TURN_S = 60.0
# Code requests in `in turn`, per conversation.
CODE_IN_TURN = 0.5


@dataclass(frozen=True)
class Setting:
    name: str
    num_prefill: int
    num_decode: int
    num_colocated: int = 0
    change_roles: bool = False

    def scenario(self) -> Scenario:
        return Scenario(
            load_cost_model(COST),
            RouterConfig(link="nccl", change_roles=self.change_roles),
            self.num_prefill,
            self.num_decode,
            self.num_colocated,
            max_model_len=MAX_MODEL_LEN,
            pool_bytes=POOL_BYTES,
            slo=SLO,
            scheduling=SchedulingConfig("aligned"),
            is_checked=False,
        )


FIXED = tuple(Setting(f"{num}+{4 - num}", num, 4 - num) for num in (1, 2, 3))
SETTINGS = (
    *FIXED,
    Setting("changing", 2, 2, change_roles=True),
    Setting("colocated", 0, 0, num_colocated=4),
)


@dataclass(frozen=True)
class Case:
    name: str
    # Requests per second.
    rate: float

    def workload(self, conversations: Sequence[Arrival], seconds: float) -> list[Arrival]:
        if self.name == "conversations":
            return chats(conversations, self.rate, seconds)
        if self.name == "code":
            return code(self.rate, seconds)
        first = in_turns(chats(conversations, self.rate, seconds), is_odd=False)
        return sorted(
            first + in_turns(code(self.rate * CODE_IN_TURN, seconds), is_odd=True),
            key=lambda arrival: arrival.time_s,
        )


CASES = (
    Case("conversations", 5.0),
    Case("conversations", 6.0),
    Case("conversations", 7.0),
    Case("code", 2.3),
    Case("code", 3.0),
    Case("in turn", 5.0),
    Case("in turn", 7.0),
)


@dataclass(frozen=True)
class Row:
    case: str
    rate: float
    setting: str
    # Share of requests that met both objectives.
    in_time: float
    ttft_p99_s: float
    tpot_p99_s: float
    num_requests: int
    num_changes: int


def chats(conversations: Sequence[Arrival], rate: float, seconds: float) -> list[Arrival]:
    return cut(scale_rate(cut(conversations, round(rate * seconds)), rate), seconds=seconds)


def code(rate: float, seconds: float) -> list[Arrival]:
    lengths = CODE.sample(round(1.5 * rate * seconds), seed=1)
    return cut(gamma_arrivals(lengths, rate, CODE_CV, seed=1), seconds=seconds)


def in_turns(workload: Sequence[Arrival], is_odd: bool) -> list[Arrival]:
    return [each for each in workload if int(each.time_s // TURN_S) % 2 == is_odd]


def measure(case: Case, workload: Sequence[Arrival]) -> Iterator[Row]:
    for setting in SETTINGS:
        ran = setting.scenario().simulate(workload)
        report = make_report(ran.streams, ran.lifetimes, SLO)
        yield Row(
            case.name,
            case.rate,
            setting.name,
            report.attainment,
            report.ttft_s.p99,
            report.tpot_s.p99,
            report.num_requests,
            ran.num_role_changes,
        )


def page(rows: Sequence[Row], seconds: float) -> str:
    names = [setting.name for setting in SETTINGS]
    cells = []
    for case, rate in dict.fromkeys((row.case, row.rate) for row in rows):
        of_case = {row.setting: row for row in rows if (row.case, row.rate) == (case, rate)}
        shares = [f"{of_case[name].in_time:.1%}" for name in names]
        cells.append((case, f"{rate:g}", *shares, of_case["changing"].num_changes))
    lines = [
        "# Instances that change between prefill and decode",
        "",
        "```sh",
        f"python -m benchmarks.role_change --conversations AzureLLMInferenceTrace_conv.csv --seconds {seconds:g}",
        "```",
        "",
        f"Four instances are simulated, with {COST}. The table has the share of requests with their first token "
        "within",
        f"{SLO.ttft_s:g} s and each further one within {SLO.tpot_s:g} s. `changing` begins as 2+2.",
        "",
        table(("traffic", "requests/s", *names, "changes"), cells),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = parser_of(__doc__, out=FOLDER)
    parser.add_argument("--conversations", type=Path, required=True, help="trace in Azure's format")
    parser.add_argument("--seconds", type=float, default=300.0)
    args = parser.parse_args()
    conversations = read_azure_trace(args.conversations)
    rows = []
    for case in CASES:
        for row in measure(case, case.workload(conversations, args.seconds)):
            rows.append(row)
            say(str(row))
    content = facts() | {"seconds": args.seconds, "cost": COST, "rows": rows}
    publish(args.out and args.out / "role_change", page(rows, args.seconds), content)


if __name__ == "__main__":
    main()
