"""What a client may ask for at most. A call is checked before anything is allocated for it. The text beside a field is
its help on the command line."""

from __future__ import annotations

import os
from collections.abc import Sequence, Sized
from dataclasses import dataclass, fields, replace
from typing import Annotated

from alignedserve.protocol.prompt_logprobs import MAX_PROMPT_LOGPROBS
from alignedserve.sampling_params import MAX_LOGPROBS, SamplingParams
from alignedserve.store import StoreLimits
from alignedserve.types import InvalidRequest

# Upper bound of the default of max_stored_bytes: part of the machine's memory may belong to other containers.
_MAX_STORED_BYTES = 4 << 30
# Log-probabilities of an answer that is not streamed, at most. They are held until it is complete, at about 80 bytes
# each: 40 MB.
MAX_OUTPUT_LOGPROBS = 1 << 19
# Token ids in a call's stop_token_ids, logit_bias, allowed_token_ids and bad_words, times its choices, at most, unless
# max_token_ids is larger. Each choice carries them in a message of its own. The router decodes this many in 20 ms.
MAX_CALL_TOKEN_IDS = 1 << 16
# The default of max_requests_per_key without API keys.
MAX_REQUESTS = 4096
# The longest objectives that a real-time request may have, in milliseconds. A request that can wait uses `flex`.
MAX_TTFT_MS = 600_000.0
MAX_TBT_MS = 60_000.0


@dataclass(frozen=True)
class CallLimits:
    max_body_bytes: Annotated[int, "maximum bytes of a request body; more is a 413", "limits"] = 8 << 20
    max_total_body_bytes: Annotated[
        int, "maximum bytes of all request bodies in memory, half of them per API key; more is a 503"
    ] = 256 << 20
    max_file_bytes: Annotated[int, "maximum bytes of an uploaded file; more is a 413"] = 200_000_000
    max_prompt_tokens: Annotated[int | None, "maximum tokens of a prompt [default: --max-model-len]"] = None
    max_call_tokens: Annotated[int, "maximum prompt tokens of a request, multiplied by its choices"] = 4 << 20
    max_choices: Annotated[int, "maximum choices of a request: prompts times n or best_of"] = 256
    max_logprobs: Annotated[int, "maximum value of logprobs and top_logprobs"] = MAX_LOGPROBS
    max_stop_strings: Annotated[int, "maximum stop strings of a request"] = 16
    max_stop_chars: Annotated[int, "maximum characters of a stop string or a bad word"] = 256
    max_token_ids: Annotated[
        int,
        "maximum entries of stop_token_ids, logit_bias, allowed_token_ids, bad_words; and tokens of all bad_words",
    ] = 1024
    max_grammar_bytes: Annotated[int, "maximum bytes of a JSON schema, regex, choice list or grammar"] = (
        64 << 10
    )
    grammar_timeout_s: Annotated[float, "CPU seconds that compiling a schema, regex or grammar may take"] = (
        1.0
    )
    max_requests_per_key: Annotated[
        int | None,
        "maximum open requests of an API key, or of all clients without keys; each choice counts; more is a 429 "
        "[default: 2048 with API keys, which is half of --max-num-queued-reqs, and 4096 without]",
    ] = None
    max_open_batches: Annotated[int, "maximum unfinished batches of all API keys; more is a 429"] = 1000
    max_open_batches_per_key: Annotated[
        int, "maximum unfinished batches of an API key or its group; more is a 429"
    ] = 200
    max_stored_bytes: Annotated[
        int | None,
        "maximum bytes that Redis keeps of results, batches and, without --files-at, files; more is a 413 "
        "[default: a quarter of this machine's memory, at most 4 GiB]",
    ] = None
    max_stored_bytes_per_key: Annotated[
        int | None,
        "--max-stored-bytes of an API key or its group [default: half of it, if there are several keys]",
    ] = None
    max_files_at_bytes: Annotated[
        int | None,
        "maximum bytes of files in --files-at; more is a 413 [default: half of the disk; no limit for a bucket]",
    ] = None
    max_files_at_bytes_per_key: Annotated[
        int | None,
        "--max-files-at-bytes of an API key or its group [default: half of it, if there are several keys]",
    ] = None
    max_connections: Annotated[
        int, "maximum open connections; beyond that, one of the key or address with the most is closed"
    ] = 8192

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and value <= 0:
                raise ValueError(f"{field.name}={value}: must be greater than 0")
        if self.max_total_body_bytes < 2 * self.max_body_bytes:
            raise ValueError(
                f"max_total_body_bytes={self.max_total_body_bytes}: must be at least twice "
                f"max_body_bytes={self.max_body_bytes}, as one API key may have half of it"
            )

    def max_requests(self, needs_keys: bool = False) -> int:
        """Returns `max_requests_per_key`, or its default. With API keys, one of them can't fill the router's queue."""
        return self.max_requests_per_key or MAX_REQUESTS // (1 + needs_keys)

    def check_counts(self, **given: Sized | None) -> None:
        """Checks the numbers of token ids and bad words, by parameter, before each is checked. Raises InvalidRequest
        that names the limit."""
        for name, each in given.items():
            if each and len(each) > self.max_token_ids:
                raise InvalidRequest(f"{name}: {len(each)} entries; at most {self.max_token_ids} are allowed")

    def of_store(self, num_owners: int, home_bytes: int | None = None) -> StoreLimits:
        """Returns the limits of the store. `home_bytes` is the size of the place for files, if that is apart and has a
        size."""
        num_bytes = self.max_stored_bytes
        if num_bytes is None:
            num_bytes = min(_num_memory_bytes() // 4, _MAX_STORED_BYTES)
        num_apart = self.max_files_at_bytes
        if num_apart is None and home_bytes is not None:
            num_apart = home_bytes // 2
        return StoreLimits(
            num_bytes,
            _of_owner(self.max_stored_bytes_per_key, num_bytes, num_owners),
            self.max_open_batches,
            self.max_open_batches_per_key,
            max_bytes_apart=num_apart,
            max_bytes_apart_of_owner=_of_owner(self.max_files_at_bytes_per_key, num_apart, num_owners),
        )

    def check(self, num_prompts: int, params: SamplingParams, structure_name: str) -> None:
        """Checks a call, with the schema or grammar in the parameter `structure_name`. Raises InvalidRequest that names
        the limit."""
        if num_prompts > self.max_choices:
            raise InvalidRequest(f"prompt: {num_prompts} prompts; at most {self.max_choices} are allowed")
        if num_prompts * params.n > self.max_choices:
            raise InvalidRequest(
                f"n={params.n}: for {num_prompts} prompts; this server gives at most {self.max_choices} choices"
            )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and count > self.max_logprobs:
                raise InvalidRequest(f"{name}={count}: must be at most {self.max_logprobs}")
        strings = params.stop_strings
        if len(strings) > self.max_stop_strings:
            raise InvalidRequest(f"stop: {len(strings)} strings; at most {self.max_stop_strings} are allowed")
        self._check_chars("stop", strings)
        self._check_chars("bad_words", params.bad_words or ())
        num_bytes = len(params.structured_outputs.text) if params.structured_outputs else 0
        if num_bytes > self.max_grammar_bytes:
            raise InvalidRequest(
                f"{structure_name}: {num_bytes} bytes; at most {self.max_grammar_bytes} are allowed"
            )

    def _check_chars(self, name: str, strings: Sequence[str]) -> None:
        longest = max(map(len, strings), default=0)
        if longest > self.max_stop_chars:
            raise InvalidRequest(
                f"{name}: a string of {longest} characters; at most {self.max_stop_chars} are allowed"
            )

    def check_prompts(self, lengths: Sequence[int], params: SamplingParams) -> None:
        """Checks the prompts and bad words of a call. `lengths` are in tokens. Raises InvalidRequest that names the
        limit."""
        longest, num_tokens = max(lengths), params.n * sum(lengths)
        if self.max_prompt_tokens is not None and longest > self.max_prompt_tokens:
            raise InvalidRequest(f"prompt: {longest} tokens; at most {self.max_prompt_tokens} are allowed")
        if num_tokens > self.max_call_tokens:
            raise InvalidRequest(
                f"prompt: {num_tokens} tokens (all prompts, n times); at most {self.max_call_tokens} are allowed"
            )
        self._check_token_ids(params.n * len(lengths), params)
        if params.prompt_logprobs is None:
            return
        number = num_tokens * (params.prompt_logprobs + 1)
        if number > MAX_PROMPT_LOGPROBS:
            raise InvalidRequest(
                f"prompt_logprobs={params.prompt_logprobs}: for {num_tokens} prompt tokens (all prompts, n times) "
                f"this makes {number} log-probabilities; at most {MAX_PROMPT_LOGPROBS} are allowed"
            )

    def _check_token_ids(self, num_choices: int, params: SamplingParams) -> None:
        counts = {
            "stop_token_ids": len(params.stop_token_ids or ()),
            "logit_bias": len(params.logit_bias or ()),
            "allowed_token_ids": len(params.allowed_token_ids or ()),
            "bad_words": sum(map(len, params.bad_word_ids or ())),
        }
        if counts["bad_words"] > self.max_token_ids:
            raise InvalidRequest(
                f"bad_words: {counts['bad_words']} tokens (with and without a space before each word); "
                f"at most {self.max_token_ids} are allowed"
            )
        number, most = num_choices * sum(counts.values()), max(MAX_CALL_TOKEN_IDS, self.max_token_ids)
        if number > most:
            raise InvalidRequest(
                f"{max(counts, key=counts.__getitem__)}: for {num_choices} choices, the token ids of "
                f"{', '.join(name for name in counts if counts[name])} make {number}; "
                f"at most {most} are allowed"
            )

    def with_room_for_logprobs(
        self, lengths: Sequence[int], params: SamplingParams, num_kept: int | None, max_model_len: int
    ) -> SamplingParams:
        """Returns parameters for which the log-probabilities fit: without max_tokens, the answer gets as many tokens as
        fit. `num_kept` is the number of top log-probabilities per token that are held until the answer is complete.
        Raises InvalidRequest if the call asks for more."""
        if num_kept is None:
            return params
        rooms = (max_model_len - length for length in lengths)
        num_tokens = params.n * sum(min(room, params.max_tokens or room) for room in rooms)
        number = num_tokens * (num_kept + 1)
        if number <= MAX_OUTPUT_LOGPROBS:
            return params
        longest = MAX_OUTPUT_LOGPROBS // (params.n * len(lengths) * (num_kept + 1))
        if params.max_tokens is not None or longest < max(1, params.min_tokens):
            raise InvalidRequest(
                f"logprobs={num_kept}: for up to {num_tokens} tokens (of all choices) this makes {number} "
                f"log-probabilities; at most {MAX_OUTPUT_LOGPROBS} are allowed without stream=true"
            )
        return replace(params, max_tokens=longest)


@dataclass(frozen=True)
class SloConfig:
    """Default objectives of real-time requests, by service tier, in milliseconds; 0: no objective."""

    ttft_ms: Annotated[float, "default TTFT objective in milliseconds; 0 is none", "latency"] = 1000.0
    tbt_ms: Annotated[float, "default TBT objective (time between tokens) in milliseconds; 0 is none"] = 100.0
    priority_ttft_ms: Annotated[float, "--slo-ttft-ms of service_tier=priority"] = 500.0
    priority_tbt_ms: Annotated[float, "--slo-tbt-ms of service_tier=priority"] = 50.0

    def __post_init__(self) -> None:
        for name, most_ms in (("ttft_ms", MAX_TTFT_MS), ("tbt_ms", MAX_TBT_MS)):
            for each in (name, f"priority_{name}"):
                value = getattr(self, each)
                if value != 0 and not 1 <= value <= most_ms:
                    raise ValueError(f"slo_{each}={value}: must be 0 or from 1 to {most_ms:.0f}")

    def of(self, name: str) -> tuple[float | None, float | None]:
        """Returns the default objectives of a tier, in seconds: for the first token, and for each further token."""
        is_priority = name == "priority"
        ttft_ms = self.priority_ttft_ms if is_priority else self.ttft_ms
        tbt_ms = self.priority_tbt_ms if is_priority else self.tbt_ms
        return ttft_ms / 1000 or None, tbt_ms / 1000 or None


def _of_owner(limit: int | None, of_all: int | None, num_owners: int) -> int | None:
    return of_all // 2 if limit is None and of_all is not None and num_owners > 1 else limit


def _num_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
