"""A mutant as a change of one place in one file, which leaves the number of lines as it is."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Edit:
    # The path of the file, from the root of the repository.
    file: str
    # The first line of the innermost statement that is changed; from 1.
    statement_line: int
    # Where the change begins; the line from 1, the column in bytes from 0, as `ast` counts them.
    line: int
    column: int
    end_line: int
    end_column: int
    # Whether an expression is changed; otherwise, a statement.
    is_expression: bool
    # The code that stands there, without its line breaks, and the code that takes its place.
    old: str
    new: str
    # The function, as `__qualname__` says it, and how often the same change occurs before it in that function.
    function: str
    number: int
    # What is told of it instead of its code.
    title: str = ""
    # The systems in which vopr looks for it, as for `alignedserve vopr --system`; none: in all.
    systems: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Is the same wherever in the file the function stands: eight hexadecimal digits."""
        text = "\0".join((self.file, self.function, self.old, self.new, str(self.number)))
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @property
    def name(self) -> str:
        if self.title:
            return f"{self.file}:{self.line} {self.title}"
        return f"{self.file}:{self.line}:{self.column} `{_short(self.old)}` → `{_short(self.new)}`"

    def rank(self, seed: int) -> str:
        """Mutants are drawn in the order of this: a seed's order of two of them hangs on nothing else."""
        return hashlib.sha256(f"{seed}\0{self.key}".encode()).hexdigest()

    def applied(self, text: str) -> str:
        lines = text.encode().split(b"\n")
        first, last = lines[self.line - 1], lines[self.end_line - 1]
        padding = b"\n" * (self.end_line - self.line - self.new.count("\n"))
        if self.is_expression:
            changed = (
                first[: self.column] + b"(" + self.new.encode() + padding + b")" + last[self.end_column :]
            )
        else:
            changed = first[: self.column] + self.new.encode() + last[self.end_column :] + padding
        return b"\n".join([*lines[: self.line - 1], changed, *lines[self.end_line :]]).decode()


def _short(code: str) -> str:
    return code if len(code) <= 90 else f"{code[:60]} … {code[-25:]}"
