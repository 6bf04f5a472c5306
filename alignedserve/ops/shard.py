"""The part of a model that a rank holds: some heads of each layer, and some of the MLP's inner values.

A linear layer with split outputs needs nothing from other ranks: the next operations work on those outputs alone. One
with split inputs yields a part of each sum, and the ranks' parts are added up. The head's outputs are split, too. They
are joined for the leading rank, which chooses tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Split(Enum):
    """How ranks combine the results of a linear layer."""

    # Not at all: every rank has the whole layer, or the next operations need only this rank's outputs.
    NONE = "none"
    # Each rank has some of the inputs. Results are added up, and every rank gets the sum.
    INPUTS = "inputs"
    # Each rank has some of the outputs. The leading rank gets all of them.
    OUTPUTS = "outputs"


@dataclass(frozen=True)
class RankPart:
    """The part of a linear layer that a rank has: the whole layer by default."""

    # Some outputs of each layer of the checkpoint.
    outputs: Sequence[slice] | None = None
    inputs: slice | None = None


WHOLE = RankPart()


@dataclass(frozen=True)
class Shard:
    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def num(self, count: int) -> int:
        """How many of `count` units each rank has. With fewer units than ranks, several ranks have the same unit."""
        if count % self.size and self.size % count:
            raise ValueError(f"{count} units can't be divided among {self.size} ranks")
        return max(count // self.size, 1)

    def part(self, count: int, width: int = 1) -> slice:
        """This rank's part of `count` units of `width` values each."""
        first = self.rank * count // self.size
        return slice(first * width, (first + self.num(count)) * width)

    def share(self, count: int) -> int:
        """The most of `count` units that a rank has."""
        return -(-count // self.size)

    def uneven_part(self, count: int) -> slice:
        """This rank's part of `count` units. The last ranks may have fewer, or none."""
        most = self.share(count)
        return slice(min(self.rank * most, count), min((self.rank + 1) * most, count))
