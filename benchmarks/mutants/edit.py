"""A mutant as a change of one place in one file that keeps the number of lines."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Edit:
    # The file's path, relative to the root of the repository.
    file: str
    # The first line of the innermost changed statement, from 1.
    statement_line: int
    # Where the change begins: the line from 1, the column in bytes from 0, as in `ast`.
    line: int
    column: int
    end_line: int
    end_column: int
    # True if an expression is changed, False if a statement.
    is_expression: bool
    # The original code, without its line breaks, and its replacement.
    old: str
    new: str
    # The function's `__qualname__`, and how many times the same change occurs before this one in the function.
    function: str
    number: int
    # Shown instead of its code.
    title: str = ""
    # The systems vopr searches in, as for `alignedserve dev vopr --system`; empty: all.
    systems: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Returns eight hexadecimal digits that don't depend on the function's position in the file."""
        text = "\0".join((self.file, self.function, self.old, self.new, str(self.number)))
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @property
    def name(self) -> str:
        if self.title:
            return f"{self.file}:{self.line} {self.title}"
        return f"{self.file}:{self.line}:{self.column} `{_short(self.old)}` → `{_short(self.new)}`"

    def rank(self, seed: int) -> str:
        """Mutants are drawn in the order of this rank. The order of two mutants depends only on the seed and these
        two."""
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
