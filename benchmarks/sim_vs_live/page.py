"""The page: a table per load with a row per policy. Larger errors than allowed are bold."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu.record import Row
from benchmarks.sim_vs_live.figures import MOST_OFF, NAMES, is_off

HEADS = ("TTFT p50", "TTFT p90", "TBT p50", "TBT p99", "tokens/s")
# A profile that waited for a core for a larger share of the time is from a busy machine.
MOST_WAITED = 0.2
COLUMNS = " | ".join(f"{head}, live | simulated | ratio" for head in HEADS)


def line(row: Row) -> str:
    head = f"{row['policy']:9} {row['load']:9}"
    if "error" in row:
        return f"{head} FAILED {row['error'].strip().splitlines()[-1][:120]}"
    ratios = row["simulated"]["ratios"]
    return f"{head} " + "  ".join(f"{name} {ratios[name]:.2f}" for name in NAMES)


def write(path: Path) -> None:
    """Writes the page of a run's file, beside it."""
    text = "\n".join(page(json.loads(path.read_text()), path.name))
    path.with_suffix(".md").write_text(text + "\n")


def page(record: dict[str, Any], name: str) -> Iterator[str]:
    rows = [row for row in record["rows"] if "error" not in row]
    yield f"# The simulator beside live runs (`{name}`)"
    yield f"\n```sh\n{record['command']}\n```\n"
    if rows:
        yield from _about(record, rows)
        for load in dict.fromkeys(row["load"] for row in rows):
            yield from _table(load, [row for row in rows if row["load"] == load])
        yield from _overheads(rows)
    for row in record["rows"]:
        if "error" in row:
            yield f"\nNot measured: {row['policy']}, {row['load']}: {row['error'].strip().splitlines()[-1]}"


def _about(record: dict[str, Any], rows: Sequence[Row]) -> Iterator[str]:
    processors = ", ".join(sorted({row["processor"] for row in rows}))
    quiet = [row for row in rows if row["profile_waited_share"] <= MOST_WAITED]
    ratios = [
        ratio
        for row in quiet
        for name, ratio in row["simulated"]["ratios"].items()
        # At a rate, tokens/s are what arrives.
        if row["rate"] is None or name != "tokens_per_s"
    ]
    num_off = sum(map(is_off, ratios))
    yield f"{record['num_cpus']} cores, {processors}; {record['date']}; {record['num_requests']} requests per case."
    yield "Half of the requests are real time, and latencies are theirs, in milliseconds at the router. A ratio is"
    yield f"simulated to live; **bold** ones are off by more than {MOST_OFF:.0%}. They are {num_off} of {len(ratios)}"
    yield "figures, not counting tokens/s at a given rate. Simulated requests arrive when the live ones reached the"
    yield "router, including those that warm up both sides. The time for HTTP and the gateway is not included."
    if len(quiet) < len(rows):
        yield f"{len(rows) - len(quiet)} of {len(rows)} cases are not counted. Their profiles waited for a core for"
        yield f"more than {MOST_WAITED:.0%} of the time, so their times do not test the simulator."
    busy = [row["load_average"] for row in rows]
    yield f"The load average of these cores was {min(busy):.1f} to {max(busy):.1f} before a case."


def _table(load: str, rows: Sequence[Row]) -> Iterator[str]:
    first = rows[0]
    rate = "all at once" if first["rate"] is None else f"{first['rate']:g} requests/s"
    yield f"\n## {load}: {rate}, KV of {first['kv_bytes'] / 2**20:g} MiB\n"
    yield f"| policy | {COLUMNS} | iterations, live | simulated | evictions, live | simulated |"
    yield "| --- |" + " ---: |" * (3 * len(NAMES) + 4)
    for policy in dict.fromkeys(row["policy"] for row in rows):
        yield _row(policy, [row for row in rows if row["policy"] == policy])


def _row(policy: str, rounds: Sequence[Row]) -> str:
    """Returns a row with the medians of the rounds."""
    cells = [f"`{policy}`"]
    for name in NAMES:
        live, simulated = (
            median(row[side]["figures"][name] for row in rounds) for side in ("live", "simulated")
        )
        ratio = median(row["simulated"]["ratios"][name] for row in rounds)
        cells += [
            _figure(name, live),
            _figure(name, simulated),
            f"**{ratio:.2f}**" if is_off(ratio) else f"{ratio:.2f}",
        ]
    for name in ("num_iterations", "num_evicted"):
        cells += [f"{median(row[side][name] for row in rounds):,g}" for side in ("live", "simulated")]
    return f"| {' | '.join(cells)} |"


def _figure(name: str, value: float) -> str:
    return f"{value:,.0f}" if name == "tokens_per_s" else f"{1e3 * value:.2f}"


def _overheads(rows: Sequence[Row]) -> Iterator[str]:
    yield "\n## Inputs of the simulator, and times at the client\n"
    yield "The simulator gets the profile, and these inputs, measured on requests before those that count. Times are in"
    yield "milliseconds.\n"
    yield "| column | meaning |"
    yield "| --- | --- |"
    yield "| pace | how much longer iterations take than in the profile |"
    yield "| overrun | p99 of how much longer they take than then expected, for decodes and for chunks of prompts |"
    yield "| outside | time of an iteration outside the engine |"
    yield "| message | time of a message |"
    yield ""
    yield "The other columns are results: the mean iteration, the medians at the client, and those simulated with the"
    yield "profile alone. The two before the last say how far the simulated times of one request are off, at the"
    yield "median.\n"
    yield (
        "| policy | load | pace | overrun, decodes | chunks | outside | message | iteration, live | simulated "
        "| TTFT p50, client | by profile alone | TBT p50, client | by profile alone | first token of a request, off by "
        "| its last | waited for a core while profiled |"
    )
    yield "| --- | --- |" + " ---: |" * 14
    for row in rows:
        alone, client = row["by_profile_alone"]["figures"], row["client"]
        told = row["overhead"]
        ms = [told["outside_s"], told["message_s"]]
        ms += [row["live"]["iteration_s"], row["simulated"]["iteration_s"]]
        ms += [each[name] for name in ("ttft_p50_s", "tbt_p50_s") for each in (client, alone)]
        cells = [f"`{row['policy']}`", row["load"]]
        cells += [f"{told[name]:.2f}" for name in ("pace", "overruns_p99", "overruns_of_chunks_p99")]
        cells += [f"{1e3 * value:.2f}" for value in ms]
        shares = [*row["simulated"]["paired"].values(), row["profile_waited_share"]]
        cells += [f"{share:.0%}" for share in shares]
        yield f"| {' | '.join(cells)} |"
