"""Reports of broken invariants."""

from __future__ import annotations

import re
from dataclasses import dataclass


class Broken(RuntimeError):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Failure:
    # When it was detected, in virtual seconds.
    at_s: float
    # The name of the exception, and its message.
    error: str
    message: str
    # The file and the function that raised it.
    where: str

    @property
    def sort(self) -> str:
        """Identifies failures of the same kind, which differ only in numbers and names."""
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
