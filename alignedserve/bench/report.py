"""The table and the JSON file of a run, in the format of `vllm bench serve`, so that the same tools can read them.

Classes and checked answers, which vLLM does not have, are at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from alignedserve.bench.client import RequestOutcome
from alignedserve.bench.config import BenchConfig
from alignedserve.bench.results import NAMES, Results, Summary, is_whole, num_tokens, summaries, times_of

WIDTH = 50
TIER_NAMES = {"rt": "Real-time", "be": "Best-effort"}
# Long fields, which are only written with --save-detailed.
DETAILS = (
    "input_lens",
    "output_lens",
    "start_times",
    "ttfts",
    "itls",
    "latencies",
    "generated_texts",
    "errors",
    "tiers",
)


def table(config: BenchConfig, outcomes: Sequence[RequestOutcome], results: Results) -> str:
    return "\n".join(_lines(config, outcomes, results))


def _lines(config: BenchConfig, outcomes: Sequence[RequestOutcome], results: Results) -> Iterator[str]:
    yield f"{' Serving Benchmark Result ':=^{WIDTH}}"
    yield _row("Successful requests:", results.completed)
    yield _row("Failed requests:", results.failed)
    if config.max_concurrency is not None:
        yield _row("Maximum request concurrency:", config.max_concurrency)
    if not math.isinf(config.request_rate):
        yield _row("Request rate configured (RPS):", config.request_rate)
    yield _row("Benchmark duration (s):", results.duration)
    yield _row("Total input tokens:", results.total_input_tokens)
    yield _row("Total generated tokens:", results.total_output_tokens)
    yield _row("Request throughput (req/s):", results.request_throughput)
    if results.request_goodput is not None:
        yield _row("Request goodput (req/s):", results.request_goodput)
    yield _row("Output token throughput (tok/s):", results.output_throughput)
    yield _row("Peak output token throughput (tok/s):", results.max_output_tokens_per_s)
    yield _row("Peak concurrent requests:", float(results.max_concurrent_requests))
    yield _row("Total token throughput (tok/s):", results.total_token_throughput)
    for name in config.metrics:
        yield from _summary_lines(NAMES[name], name.upper(), results.summaries[name])
    yield from _class_lines(config, outcomes, results)
    yield "=" * WIDTH


def _summary_lines(title: str, name: str, summary: Summary) -> Iterator[str]:
    yield f"{title:-^{WIDTH}}"
    yield _row(f"Mean {name} (ms):", summary.mean)
    yield _row(f"Median {name} (ms):", summary.median)
    for percent, value in summary.percentiles:
        yield _row(f"P{_word(percent)} {name} (ms):", value)


def _class_lines(config: BenchConfig, outcomes: Sequence[RequestOutcome], results: Results) -> Iterator[str]:
    if config.be_share:
        for tier, name in TIER_NAMES.items():
            whole = _whole(outcomes, tier)
            found = summaries(whole, config.percentiles)
            yield f"{f'{name} requests':-^{WIDTH}}"
            yield _row("Successful requests:", len(whole))
            for metric in config.metrics:
                yield _row(f"Median {metric.upper()} (ms):", found[metric].median)
                for percent, value in found[metric].percentiles:
                    yield _row(f"P{_word(percent)} {metric.upper()} (ms):", value)
    for tier, share in results.attainment.items():
        yield _row(f"{TIER_NAMES[tier]} SLO attainment (%):", share * 100)
    if results.correct is not None:
        yield _row("Correct answers (%):", results.correct * 100)


def _row(name: str, value: float) -> str:
    shown = f"{value:<10.2f}" if isinstance(value, float) else f"{value:<10}"
    return f"{name:<40} {shown}"


def _word(percent: float) -> str:
    return str(int(percent)) if percent == int(percent) else str(percent)


def _whole(outcomes: Sequence[RequestOutcome], tier: str) -> list[RequestOutcome]:
    return [outcome for outcome in outcomes if outcome.tier == tier and is_whole(outcome)]


def result_json(
    config: BenchConfig, model: str, outcomes: Sequence[RequestOutcome], results: Results, now: datetime
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "date": now.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": config.kind,
        "backend": config.kind,
        "label": config.label,
        "model_id": model,
        "tokenizer_id": config.tokenizer,
        "num_prompts": len(outcomes),
        "request_rate": "inf" if math.isinf(config.request_rate) else config.request_rate,
        "burstiness": "inf" if math.isinf(config.burstiness) else config.burstiness,
        "max_concurrency": config.max_concurrency,
    }
    found |= _totals(results) | _details(outcomes) | _flat(config, results.summaries)
    if config.be_share:
        for tier in TIER_NAMES:
            whole = _whole(outcomes, tier)
            found[tier] = {"completed": len(whole)} | _flat(config, summaries(whole, config.percentiles))
    if not config.save_detailed:
        for name in DETAILS:
            del found[name]
    return found


def _totals(results: Results) -> dict[str, Any]:
    names = (
        *("duration", "completed", "failed", "total_input_tokens", "total_output_tokens"),
        *("request_throughput", "request_goodput", "output_throughput", "total_token_throughput"),
        *("max_output_tokens_per_s", "max_concurrent_requests"),
        *("attainment", "correct"),
    )
    return {name: getattr(results, name) for name in names}


def _details(outcomes: Sequence[RequestOutcome]) -> dict[str, Any]:
    times = [times_of(outcome) if is_whole(outcome) else None for outcome in outcomes]
    return {
        "input_lens": [outcome.prompt_len for outcome in outcomes],
        "output_lens": [num_tokens(outcome) if is_whole(outcome) else 0 for outcome in outcomes],
        "ttfts": [each.ttft if each else 0.0 for each in times],
        "itls": [list(each.itls) if each else [] for each in times],
        "latencies": [each.e2el if each else 0.0 for each in times],
        "start_times": [outcome.start_s for outcome in outcomes],
        "queue_times": [outcome.start_s - outcome.due_s for outcome in outcomes],
        "generated_texts": [outcome.text for outcome in outcomes],
        "errors": [outcome.error or "" for outcome in outcomes],
        "tiers": [outcome.tier for outcome in outcomes],
    }


def _flat(config: BenchConfig, found: dict[str, Summary]) -> dict[str, float]:
    flat: dict[str, float] = {}
    for name in config.metrics:
        summary = found[name]
        flat |= {f"mean_{name}_ms": summary.mean, f"median_{name}_ms": summary.median}
        flat[f"std_{name}_ms"] = summary.std
        flat |= {f"p{_word(percent)}_{name}_ms": value for percent, value in summary.percentiles}
    return flat


def save(config: BenchConfig, found: dict[str, Any]) -> Path:
    """Saves the results. Returns the path."""
    model = str(found["model_id"]).split("/")[-1]
    bound = f"-concurrency{config.max_concurrency}" if config.max_concurrency else ""
    made = f"{config.label or config.kind}-{config.request_rate}qps{bound}-{model}-{found['date']}.json"
    path = Path(config.result_dir or ".") / (config.result_filename or made)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without the numbers that JSON does not have: they become null.
    path.write_bytes(msgspec.json.encode(found))
    return path
