"""The runs' results as a page: ratios, jobs in time, and the jobs' tokens per second."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import table
from benchmarks.llmd_protocol.load import Chats
from benchmarks.llmd_protocol.systems import Done

AIM = (1.25, 1.5, 1.25)
# Published for two replicas of gpt-oss-120b: ratios to the interactive part alone.
PUBLISHED = {
    "llm-d, flow control by priority (published)": (1.54, 22.3, 4.3),
    "llm-d, admission control (published)": (1.76, 5.95, 2.3),
}
HEAD = (
    "",
    "TTFT p50",
    "TTFT p99",
    "gaps p99",
    "jobs in time",
    "lines left after the chats",
    "their tokens/s beside chats",
    "in all, tokens/s",
)


@dataclass(frozen=True)
class Run:
    """The results for one system."""

    name: str
    alone: Chats
    beside: Chats
    jobs: Sequence[Done]
    # Lines without an answer when the last chat had ended. If 0, some chats ran without jobs beside them.
    num_left: int
    # The jobs' output tokens per second: beside the bursts, and from the jobs' beginning to their end.
    beside_tokens_per_s: float
    tokens_per_s: float

    @property
    def ratios(self) -> tuple[float, float, float]:
        return (
            ratio(self.beside.ttft_p50_ms, self.alone.ttft_p50_ms),
            ratio(self.beside.ttft_p99_ms, self.alone.ttft_p99_ms),
            ratio(self.beside.gap_p99_ms, self.alone.gap_p99_ms),
        )


def read(text: str) -> tuple[dict[str, Any], list[Run]]:
    """Returns the machine's description and the runs from the text of `llmd_protocol.json`."""
    said = json.loads(text)
    return said, [_run(row) for row in said.pop("rows")]


def _run(row: Mapping[str, Any]) -> Run:
    of_chats = {name: Chats(**row[name]) for name in ("alone", "beside")}
    return Run(**{**row, **of_chats, "jobs": [Done(**job) for job in row["jobs"]]})


def ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan


def page(scale: Mapping[str, Any], runs: Sequence[Run]) -> str:
    rows = [_cells(run) for run in runs]
    rows.append(("aim", *map(_number, AIM), "all", "", "", ""))
    rows += [(name, *map(_number, ratios), "", "", "", "") for name, ratios in PUBLISHED.items()]
    return f"""# Chats in bursts beside batch jobs, as llm-d measured them

```sh
{scale["command"]}
```

{scale["date"]}, {scale["processor"]} cores, guidellm {scale["guidellm"]}. {_scaled(scale)}

The ratios compare answered chats beside the jobs with answered chats alone. The published figures are from another
model on other machines, and for orientation only.

{table(HEAD, rows)}

The times behind the ratios are in milliseconds:

{table(("", "chats", "TTFT p50", "p99", "gaps p99", "answered", "failed", "open at a phase's end"), _times(runs))}

{table(("", "window", "lines", "answered", "done after, s", "in time"), _jobs(runs))}
"""


def _scaled(scale: Mapping[str, Any]) -> str:
    return (
        f"With {scale['num_at_once']} chats open at once and no jobs, this server's default policy answered "
        f"{scale['capacity_per_s']:.1f} chats a second. A burst has {scale['burst_share']:.0%} of that, "
        f"{scale['rate']:.2f} a second for {scale['phase_s']:g} s. Before each of {scale['rounds']} bursts, "
        f"{scale['calm_rate']:.2f} chats a second arrive for as long. Best effort alone made "
        f"{scale['be_tokens_per_s']:,.0f} tokens a second. There are {len(scale['windows'])} jobs of "
        f"{scale['lines']} lines with {scale['line_tokens']} tokens of output each. At that pace they take "
        f"{scale['jobs_share']:g} times as long as the bursts."
    )


def _cells(run: Run) -> Sequence[str]:
    in_time = f"{sum(job.is_in_time for job in run.jobs)} of {len(run.jobs)}"
    tokens = f"{run.beside_tokens_per_s:,.0f}", f"{run.tokens_per_s:,.0f}"
    return run.name, *map(_number, run.ratios), in_time, f"{run.num_left:,}", *tokens


def _times(runs: Sequence[Run]) -> list[Sequence[str]]:
    return [
        (
            *(run.name, case, _number(chats.ttft_p50_ms), _number(chats.ttft_p99_ms)),
            *(
                _number(chats.gap_p99_ms),
                f"{chats.num_calls:,}",
                f"{chats.num_failed:,}",
                f"{chats.num_open:,}",
            ),
        )
        for run in runs
        for case, chats in (("alone", run.alone), ("beside jobs", run.beside))
    ]


def _jobs(runs: Sequence[Run]) -> list[Sequence[str]]:
    return [
        (
            *(run.name, job.window, str(job.num_lines), str(job.num_answered)),
            *("" if job.took_s is None else f"{job.took_s:.0f}", "yes" if job.is_in_time else "no"),
        )
        for run in runs
        for job in run.jobs
    ]


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"
