"""Settings of `alignedserve bench serve`, with vLLM's names. Beside a field are its help and its choices."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Annotated

from alignedserve import demo

BACKENDS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
DATASETS = ("random", "custom", "demo", "azure")
METRICS = ("ttft", "tpot", "itl", "e2el")
OBJECTIVES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class BenchConfig:
    base_url: Annotated[str | None, "URL of the server [default: http://HOST:PORT]", "server"] = None
    host: Annotated[str, "address of the server"] = "127.0.0.1"
    port: Annotated[int, "port of the server"] = 8000
    backend: Annotated[
        str | None, "API: completions or chat [default: openai; openai-chat for demo tasks]", tuple(BACKENDS)
    ] = None
    endpoint: Annotated[str | None, "path of the API [default: the backend's]"] = None
    model: Annotated[str | None, "name of the model [default: the first that the server lists]"] = None
    tokenizer: Annotated[
        str | None, "directory of the model's tokenizer, for random prompts of exact lengths"
    ] = None
    api_key: Annotated[str | None, "API key of the server [default: $OPENAI_API_KEY]"] = None

    dataset_name: Annotated[
        str | None,
        "prompts: custom is a JSONL file, demo has tasks with checked answers, azure a trace "
        "[default: random; demo for the demo model]",
        DATASETS,
        "requests",
    ] = None
    dataset_path: Annotated[str | None, "file of custom or azure"] = None
    # Prompts at the beginning of a custom file that are left out, because an earlier run had them.
    num_skipped: int = 0
    num_prompts: Annotated[int, "number of requests"] = 1000
    random_input_len: Annotated[int, "tokens of random prompts"] = 1024
    random_output_len: Annotated[int, "tokens of their answers"] = 128
    random_range_ratio: Annotated[
        float, "both lengths are uniform between len*(1-ratio) and len*(1+ratio)"
    ] = 0.0
    custom_output_len: Annotated[int, "tokens of answers without output_tokens in the JSONL file"] = 256
    be_share: Annotated[float, "share of requests that are best effort (service_tier=flex)"] = 0.0

    request_rate: Annotated[float, "requests per second; inf sends all at once", "arrivals"] = math.inf
    burstiness: Annotated[float, "burstiness of arrivals: 1 is Poisson, less is burstier, inf is regular"] = (
        1.0
    )
    trace_speed: Annotated[float, "speed of an azure trace, without a request rate"] = 1.0
    max_concurrency: Annotated[
        int | None, "maximum open requests; others wait in the client [default: no limit]"
    ] = None

    temperature: Annotated[
        float | None, "sampling temperature [default: 0 for demo tasks, else the server's]", "requests"
    ] = None
    ignore_eos: Annotated[bool, "generate answers to their full length; not all servers support it"] = False
    request_timeout_s: Annotated[
        float, "seconds after which an incomplete answer counts as failed", "server"
    ] = 600.0
    seed: Annotated[int, "seed of lengths, arrivals and prompts", "requests"] = 0

    goodput: Annotated[
        str | None,
        'objectives in milliseconds, as in "ttft:200 tpot:50 e2el:5000"; best effort has none',
        "results",
    ] = None
    percentile_metrics: Annotated[str, "metrics to report, separated by commas"] = "ttft,tpot,itl,e2el"
    metric_percentiles: Annotated[str, "percentiles of each metric, separated by commas"] = "99"
    save_result: Annotated[bool, "write a JSON file"] = False
    save_detailed: Annotated[bool, "add times, text and error of every request to the file"] = False
    result_dir: Annotated[str | None, "directory of the file [default: the current one]"] = None
    result_filename: Annotated[str | None, "name of the file [default: label, rate, model and date]"] = None
    label: Annotated[str | None, "label of the result [default: the backend]"] = None
    plot: Annotated[str | None, "PNG file to draw, with TTFT, TPOT, and attainment over time"] = None
    disable_tqdm: Annotated[bool, "show no progress bar"] = False

    def __post_init__(self) -> None:
        if self.backend is not None:
            _one_of("backend", self.backend, BACKENDS)
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"base_url={self.base_url!r}: must begin with http:// or https://")
        if self.dataset_name is not None:
            _one_of("dataset_name", self.dataset_name, DATASETS)
        if self.dataset_name in ("custom", "azure") and self.dataset_path is None:
            raise ValueError(f"dataset_path: {self.dataset_name} needs one")
        for name in ("num_prompts", "random_input_len", "random_output_len", "custom_output_len"):
            _above_zero(name, getattr(self, name))
        for name in ("request_rate", "burstiness", "trace_speed", "request_timeout_s"):
            _above_zero(name, getattr(self, name))
        if self.max_concurrency is not None:
            _above_zero("max_concurrency", self.max_concurrency)
        if not 0 <= self.random_range_ratio < 1:
            raise ValueError(f"random_range_ratio={self.random_range_ratio}: must be in [0, 1)")
        if not 0 <= self.be_share <= 1:
            raise ValueError(f"be_share={self.be_share}: must be in [0, 1]")
        for name in self.metrics:
            _one_of("percentile_metrics", name, METRICS)
        if not all(0 <= each <= 100 for each in self.percentiles):
            raise ValueError(f"metric_percentiles={self.metric_percentiles!r}: must be from 0 to 100")
        _ = self.objectives

    @property
    def url(self) -> str:
        return (self.base_url or f"http://{self.host}:{self.port}").rstrip("/")

    def dataset_for(self, model: str) -> str:
        """Returns the prompts for this model. The demo model's context is too short for the default random ones, so it
        gets tasks, unless other random prompts were chosen."""
        random_ones = [each for each in fields(self) if each.name.startswith("random_")]
        is_chosen = self.tokenizer or any(getattr(self, each.name) != each.default for each in random_ones)
        return self.dataset_name or ("demo" if model == demo.NAME and not is_chosen else "random")

    @property
    def kind(self) -> str:
        """The backend, also if none was named."""
        return self.backend or ("openai-chat" if self.dataset_name == "demo" else "openai")

    @property
    def path(self) -> str:
        return self.endpoint or BACKENDS[self.kind]

    @property
    def sent_temperature(self) -> float | None:
        """The temperature of requests; None is the server's. Answers to demo tasks are checked, so they are greedy."""
        return 0.0 if self.temperature is None and self.dataset_name == "demo" else self.temperature

    @property
    def metrics(self) -> list[str]:
        return self.percentile_metrics.split(",")

    @property
    def percentiles(self) -> list[float]:
        try:
            return [float(each) for each in self.metric_percentiles.split(",")]
        except ValueError:
            raise ValueError(
                f"metric_percentiles={self.metric_percentiles!r}: must be numbers with commas between them"
            ) from None

    @property
    def objectives(self) -> dict[str, float]:
        """The objectives in milliseconds by name."""
        found = {}
        for pair in (self.goodput or "").split():
            name, separator, value = pair.partition(":")
            if not separator and "=" in pair:
                raise ValueError(f"goodput={pair!r}: write {pair.replace('=', ':', 1)}")
            _one_of("goodput", name, OBJECTIVES)
            try:
                found[name] = float(value)
            except ValueError:
                raise ValueError(f"goodput={pair!r}: must look like ttft:200") from None
            _above_zero(f"goodput {name}", found[name])
        return found


def _one_of(name: str, value: str, known: Iterable[str]) -> None:
    names = list(known)
    if value not in names:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(names)}")


def _above_zero(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name}={value}: must be above 0")
