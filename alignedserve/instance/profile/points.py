"""The content of an iteration, and how long it took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    # Per chunk: the tokens computed before, and the tokens to compute.
    chunks: tuple[tuple[int, int], ...] = ()
    # Length of each decode in tokens, including the one that it computes.
    lengths: tuple[int, ...] = ()

    @property
    def num_kv_tokens(self) -> int:
        return sum(before + count for before, count in self.chunks) + sum(self.lengths)

    @property
    def num_computed(self) -> int:
        return sum(count for _, count in self.chunks) + len(self.lengths)

    @property
    def kind(self) -> str:
        if self.chunks:
            return "both" if self.lengths else "chunk"
        return "decode"


@dataclass(frozen=True)
class Measured:
    point: Point
    seconds: float
