"""Settings of `alignedserve bench compare`. Beside a field are its help and its choices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from alignedserve.bench.config import BenchConfig

DATASETS = ("random", "custom", "demo")
# The sets of requests that a server gets, in their order. No two have the same prompts: otherwise a server would find
# those of an earlier one in its prefix cache.
_SETS = range(4)
WARM_UP, ALONE, BESIDE, JOB = _SETS


@dataclass(frozen=True)
class CompareConfig:
    label: Annotated[
        tuple[str, ...], "name of a server; repeat for each [default: host and port]", "servers"
    ] = ()
    model: Annotated[str | None, "name of the model [default: the first that each server lists]"] = None
    api_key: Annotated[
        tuple[str, ...], "API key; repeat for one of each server [default: $OPENAI_API_KEY]"
    ] = ()
    request_timeout_s: Annotated[float, "seconds after which an incomplete answer counts as failed"] = 600.0

    dataset_name: Annotated[
        str, "chat prompts: custom is a JSONL file, demo has tasks of the demo model", DATASETS, "chat"
    ] = "random"
    dataset_path: Annotated[str | None, "file of custom"] = None
    num_prompts: Annotated[int, "number of chat requests, alone and again beside the job"] = 60
    num_warmups: Annotated[int, "chat requests that each server gets before anything is measured"] = 4
    request_rate: Annotated[float, "chat requests per second"] = 2.0
    input_len: Annotated[int, "words of a random chat prompt"] = 200
    output_len: Annotated[int, "tokens of its answer"] = 64
    goodput: Annotated[str, "objectives of chat in milliseconds"] = "ttft:1000 tpot:100"

    job_lines: Annotated[int, "lines of the batch job", "batch"] = 2000
    job_input_len: Annotated[int, "words of a line's prompt"] = 200
    job_output_len: Annotated[int, "tokens of its answer"] = 128
    job_concurrency: Annotated[int, "open best-effort requests on a server without a batch API"] = 64
    job_warmup_s: Annotated[float, "seconds from the job's first answer until chat begins"] = 5.0

    temperature: Annotated[
        float | None, "sampling temperature [default: 0 for demo tasks, else the server's]", "chat"
    ] = None
    ignore_eos: Annotated[bool, "generate answers to their full length; not all servers support it"] = False
    seed: Annotated[int, "seed of prompts and arrivals"] = 0

    def __post_init__(self) -> None:
        for name in (
            "input_len",
            "output_len",
            "num_warmups",
            "job_lines",
            "job_input_len",
            "job_output_len",
            "job_concurrency",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be above 0")
        if not 0 <= self.job_warmup_s <= 3600:
            raise ValueError(f"job_warmup_s={self.job_warmup_s}: must be from 0 to 3600")
        if not self.goodput.split():
            raise ValueError("goodput: needs an objective, such as ttft:1000")
        # Checks the other fields.
        _ = self.chat("http://host", ALONE)

    @property
    def num_chats(self) -> int:
        """Chat requests that each server gets."""
        return self.num_warmups + 2 * self.num_prompts

    def chat(self, url: str, which: int) -> BenchConfig:
        """Returns the settings of one set of chat requests: WARM_UP, ALONE or BESIDE."""
        is_warm_up = which == WARM_UP
        return BenchConfig(
            base_url=url,
            backend="openai-chat",
            dataset_name=self.dataset_name,
            dataset_path=self.dataset_path,
            num_skipped=(0, self.num_warmups, self.num_warmups + self.num_prompts)[which],
            num_prompts=self.num_warmups if is_warm_up else self.num_prompts,
            random_input_len=self.input_len,
            random_output_len=self.output_len,
            custom_output_len=self.output_len,
            request_rate=math.inf if is_warm_up else self.request_rate,
            temperature=self.temperature,
            ignore_eos=self.ignore_eos,
            request_timeout_s=self.request_timeout_s,
            seed=self._seed(which),
            goodput=self.goodput,
        )

    def job(self, url: str) -> BenchConfig:
        """Returns the settings that the lines of the job are made from."""
        return BenchConfig(
            base_url=url,
            backend="openai-chat",
            num_prompts=self.job_lines,
            random_input_len=self.job_input_len,
            random_output_len=self.job_output_len,
            temperature=self.temperature,
            ignore_eos=self.ignore_eos,
            seed=self._seed(JOB),
        )

    def _seed(self, which: int) -> int:
        """Also differs from all seeds of the same command with another --seed."""
        return len(_SETS) * self.seed + which
