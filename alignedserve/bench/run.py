"""Runs a benchmark of one server, from making the workload to saving the results."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from math import inf
from pathlib import Path
from typing import Any

import httpx2
from tqdm import tqdm

from alignedserve.bench.client import Client, RequestOutcome, first_model
from alignedserve.bench.config import BenchConfig
from alignedserve.bench.figure import figure_class
from alignedserve.bench.plot import draw
from alignedserve.bench.report import result_json, save, table
from alignedserve.bench.results import evaluate
from alignedserve.bench.workload import Item, make_workload

MAX_ERRORS_SHOWN = 10
CONNECT_TIMEOUT_S = 30.0


def run(config: BenchConfig, say: Callable[[str], None]) -> dict[str, Any]:
    """Runs the benchmark, prints the results, and saves and draws them if the settings say so. Returns the results.

    Raises ValueError for settings that can't work.
    """
    if config.plot:
        figure_class()
    if config.dataset_name is None:
        config = replace(config, dataset_name=config.dataset_for(asyncio.run(_model(config))))
    items = make_workload(config)
    model, outcomes, duration_s = asyncio.run(_ask(config, items))
    results = evaluate(outcomes, duration_s, config.objectives, config.percentiles)
    for error in _errors(outcomes):
        say(error)
    say(table(config, outcomes, results))
    found = result_json(config, model, outcomes, results, datetime.now())
    if config.save_result:
        say(f"Saved to {save(config, found)}")
    if config.plot:
        pace = (
            f"at {config.request_rate:g}/s" if config.request_rate < inf else "as fast as the input has them"
        )
        title = f"{config.label or config.url}, {model}: {len(items)} requests {pace}"
        draw(outcomes, config.objectives, duration_s, title, Path(config.plot))
        say(f"Drawn to {config.plot}")
    return found


def http_client(timeout_s: float, api_key: str | None) -> httpx2.AsyncClient:
    """Returns a client without a limit on connections: the load generator has its own."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx2.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
    return httpx2.AsyncClient(headers=headers, limits=limits, timeout=timeout, trust_env=False)


async def _model(config: BenchConfig) -> str:
    async with _client_for(config) as http:
        return config.model or await first_model(http, config.url)


def _client_for(config: BenchConfig) -> httpx2.AsyncClient:
    return http_client(config.request_timeout_s, config.api_key or os.environ.get("OPENAI_API_KEY"))


async def _ask(config: BenchConfig, items: Sequence[Item]) -> tuple[str, list[RequestOutcome], float]:
    async with _client_for(config) as http:
        model = config.model or await first_model(http, config.url)
        # None draws a bar in a terminal only
        with tqdm(total=len(items), disable=config.disable_tqdm or None) as bar:
            outcomes, duration_s = await Client(config, http, model).run(items, lambda outcome: bar.update())
    return model, outcomes, duration_s


def _errors(outcomes: Sequence[RequestOutcome]) -> list[str]:
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    shown = [f"Failed: {error}" for error in errors[:MAX_ERRORS_SHOWN]]
    return shown + ([f"... and {len(errors) - len(shown)} more"] if len(errors) > len(shown) else [])
