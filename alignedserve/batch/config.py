"""How batch jobs are run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from alignedserve.store.homes import parse_place

# This is OpenAI's limit.
MAX_LINES = 50_000
# The same limit with blank lines: one after each line, and no more that would only cost time.
MAX_LINES_WITH_BLANKS = 2 * MAX_LINES

# A line is in memory as a whole.
MAX_LINE_BYTES = 8 << 20
# An answer is stored and written to the output as a whole.
MAX_RESULT_BYTES = 32 << 20

# Lines that begin alike are run together, among so many lines, or lines of so many bytes, whichever is less.
WINDOW_LINES = 1024
WINDOW_BYTES = 8 << 20

# Lines are read on the event loop, where streams are waiting, in steps of so many lines or so many bytes, whichever is
# less. A line that is longer than a step is read by a process of its own.
STEP_LINES = 64
STEP_BYTES = 64 << 10


@dataclass(frozen=True)
class BatchConfig:
    max_num_lines: Annotated[int, "maximum lines of batch jobs that run at once"] = 64
    inputs_from: Annotated[
        tuple[str, ...],
        "directory or s3://BUCKET/PREFIX of input files that any API key may use; repeat for more",
    ] = ()
    # The most bytes of the lines that run at a time, since a file may consist of the longest lines that are allowed.
    max_bytes: int = 16 << 20
    # The most jobs whose lines run at a time; each has a chunk of its file in memory.
    max_num_jobs: int = 8
    # The most jobs whose files are validated, and the most that are brought to an end, at a time; neither waits for
    # jobs that run.
    max_num_validating: int = 2
    max_num_ending: int = 4
    # The seconds after which a job whose holder has died is taken over.
    lease_s: float = 5.0
    # The seconds between two looks for jobs; leases are renewed as often.
    look_s: float = 1.0
    # The seconds until a line that could not be answered is tried again, at first and at most.
    retry_s: float = 0.2
    max_retry_s: float = 5.0
    # The most times that a line is tried which failed; a line that the system was too busy to take is not counted.
    max_num_tries: int = 4
    # A line that was running so often when the gateway died is suspected of having killed it, and runs alone from then
    # on.
    num_falls_alone: int = 2
    # A line that was running so often when the gateway died is answered with an error.
    max_num_falls: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.max_num_lines <= 65536:
            raise ValueError(f"batch_max_num_lines={self.max_num_lines}: must be from 1 to 65536")
        for prefix in self.inputs_from:
            try:
                parse_place(prefix)
            except ValueError as error:
                raise ValueError(f"batch_inputs_from={prefix!r}: {error}") from None
