"""Settings and limits of batch jobs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from alignedserve.store.homes import parse_place

# OpenAI's limit.
MAX_LINES = 50_000
# The limit with blank lines included: one after each line. More would only cost time.
MAX_LINES_WITH_BLANKS = 2 * MAX_LINES

# Limits of `max_num_lines`, as it is given and as it is chosen.
MAX_LINES_AT_ONCE = 65536
LEAST_LINES_AT_ONCE = 64

# A line is held in memory as a whole.
MAX_LINE_BYTES = 8 << 20
# An answer is stored, and written to the output, as a whole.
MAX_RESULT_BYTES = 32 << 20

# Size of the window in which lines are sorted by their beginnings (alike.py). It ends at whichever comes first.
WINDOW_LINES = 1024
WINDOW_BYTES = 8 << 20

# Files are read on the event loop, which also serves streams. These limit one step; it ends at whichever comes first. A
# longer line is parsed in a child process.
STEP_LINES = 64
STEP_BYTES = 64 << 10


@dataclass(frozen=True)
class BatchConfig:
    max_num_lines: Annotated[
        int | None,
        "maximum lines of batch jobs that a gateway runs at once [default: twice the requests that all instances run "
        "at once when the server starts, at least 64]",
        "batch",
    ] = None
    inputs_from: Annotated[
        tuple[str, ...],
        "directory or s3://BUCKET/PREFIX of input files that any API key may use; repeat for more",
    ] = ()
    # The most bytes of lines that run at the same time. A file may consist of the longest allowed lines.
    max_bytes: int = 16 << 20
    # The most jobs with running lines. Each holds a chunk of its file in memory.
    max_num_jobs: int = 8
    # The most jobs that are validated, and the most that are finished, at the same time. Running jobs don't delay
    # either.
    max_num_validating: int = 2
    max_num_ending: int = 4
    # Seconds until another gateway takes over the job of one that died.
    lease_s: float = 5.0
    # Seconds between looks for jobs. Leases are renewed at the same interval.
    look_s: float = 1.0
    # Seconds until a failed line is tried again, at first and at most.
    retry_s: float = 0.2
    max_retry_s: float = 5.0
    # The most failed tries of a line. A refusal because the system is busy is not counted.
    max_num_tries: int = 4
    # A line that was running in this many crashes of a gateway may be the cause. From then on it runs alone.
    num_falls_alone: int = 2
    # A line that was running in this many crashes is answered with an error.
    max_num_falls: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.num_lines <= MAX_LINES_AT_ONCE:
            raise ValueError(
                f"batch_max_num_lines={self.max_num_lines}: must be from 1 to {MAX_LINES_AT_ONCE}"
            )
        for prefix in self.inputs_from:
            try:
                parse_place(prefix)
            except ValueError as error:
                raise ValueError(f"batch_inputs_from={prefix!r}: {error}") from None

    @property
    def num_lines(self) -> int:
        """The limit of lines that run at once."""
        return LEAST_LINES_AT_ONCE if self.max_num_lines is None else self.max_num_lines

    def for_slots(self, num_slots: int) -> BatchConfig:
        """Returns the settings beside instances that run `num_slots` requests at once.

        By default twice as many lines run: when a request ends, another one waits to take its place, and batches are
        formed among more than fit.
        """
        if self.max_num_lines is not None:
            return self
        fitting = min(max(2 * num_slots, LEAST_LINES_AT_ONCE), MAX_LINES_AT_ONCE)
        return replace(self, max_num_lines=fitting)
