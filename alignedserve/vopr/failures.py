"""What it looks like when something that always holds does not."""

from __future__ import annotations

import re
from dataclasses import dataclass


class Broken(RuntimeError):
    """Something that always holds does not."""


@dataclass(frozen=True)
class Failure:
    # The virtual second at which it showed.
    at_s: float
    # The name of the exception, and what it says.
    error: str
    message: str
    # The file and the function that raised.
    where: str

    @property
    def sort(self) -> str:
        """Failures of one sort differ in numbers and names only."""
        plain = re.sub(r"[\[({].*[\])}]|\d+(\.\d+)?", "_", self.message)
        return f"{self.error} in {self.where}: {plain[:60]}"

    def __str__(self) -> str:
        return f"at {self.at_s:.6f} s, {self.error} in {self.where}: {self.message}"


def failure_of(error: Exception, at_s: float) -> Failure:
    trace, where = error.__traceback__, "?"
    while trace:
        code = trace.tb_frame.f_code
        where = f"{'/'.join(code.co_filename.split('/')[-2:])}, {code.co_name}"
        trace = trace.tb_next
    return Failure(at_s, type(error).__name__, str(error), where)
