"""How batch jobs are run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

# OpenAI's limit
MAX_LINES = 50_000
# The same with blank ones: one after each, and none that only cost time.
MAX_LINES_WITH_BLANKS = 2 * MAX_LINES
ENDPOINTS = ("/v1/chat/completions", "/v1/completions")

# Of a file, as it is stored: enough for few round trips, and little to have in memory.
CHUNK_BYTES = 1 << 20
# A line is in memory whole.
MAX_LINE_BYTES = 8 << 20
# An answer is stored whole, and written to the output whole.
MAX_RESULT_BYTES = 32 << 20

# Lines are read on the event loop, where streams are waiting, in steps: so many lines, or so many bytes, whichever is
# less. A line that is longer than a step is read by a process of its own.
STEP_LINES = 64
STEP_BYTES = 64 << 10


@dataclass(frozen=True)
class BatchConfig:
    max_num_lines: Annotated[int, "lines of batch jobs that run at a time"] = 64
    # and bytes of them: a file may be of lines as long as there may be
    max_bytes: int = 16 << 20
    # jobs whose lines run at a time; each has a chunk of its file in memory
    max_num_jobs: int = 8
    # jobs whose files are looked at, and jobs that are brought to an end: neither waits for those that run
    max_num_validating: int = 2
    max_num_ending: int = 4
    # A job whose holder has died is taken over after so long.
    lease_s: float = 5.0
    # between looks at which jobs there are, which is also how often a lease is renewed
    look_s: float = 1.0
    # A line that could not be answered is tried again after so long, at first and at most;
    retry_s: float = 0.2
    max_retry_s: float = 5.0
    # and so often when it failed, rather than not being taken
    max_num_tries: int = 4
    # A line that was under way so often when the gateway went down is suspected, and runs alone from there on;
    num_falls_alone: int = 2
    # and after so often it is answered with an error
    max_num_falls: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.max_num_lines <= 65536:
            raise ValueError(f"batch_max_num_lines={self.max_num_lines}: must be from 1 to 65536")
