"""How batch jobs are run."""

from __future__ import annotations

from dataclasses import dataclass

# OpenAI's limit
MAX_LINES = 50_000
ENDPOINTS = ("/v1/chat/completions", "/v1/completions")

# Of a file, as it is stored: enough for few round trips, and little to have in memory.
CHUNK_BYTES = 1 << 20
# A line is in memory whole.
MAX_LINE_BYTES = 8 << 20


@dataclass(frozen=True)
class BatchConfig:
    # lines that run at a time, of all jobs together
    max_num_lines: int = 64
    # and bytes of them: a file may be of lines as long as there may be
    max_bytes: int = 16 << 20
    # jobs whose lines run at a time; each has a chunk of its file in memory
    max_num_jobs: int = 8
    # A job whose holder has died is taken over after so long.
    lease_s: float = 5.0
    # between looks at which jobs there are, which is also how often a lease is renewed
    look_s: float = 1.0
    # A line that could not be answered is tried again after so long, at first and at most;
    retry_s: float = 0.2
    max_retry_s: float = 5.0
    # and so often when it failed, rather than not being taken
    max_num_tries: int = 4
