"""Which part of a model a rank holds: of each layer some heads, and some of the MLP's inner values.

A linear layer whose outputs are split needs nothing of other ranks: what follows works on those outputs alone. One
whose inputs are split yields a part of each sum, and the ranks' parts are added up. The head's outputs are split as
well, and put side by side for the leading rank, which chooses tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Split(Enum):
    """What ranks do with what a linear layer yields."""

    # Nothing: every rank has the whole layer, or what follows needs this rank's outputs only.
    NONE = "none"
    # Each rank has some of the inputs: results are added up, and every rank has the sum.
    INPUTS = "inputs"
    # Each rank has some of the outputs: the leading rank has all of them.
    OUTPUTS = "outputs"


@dataclass(frozen=True)
class Shard:
    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def num(self, count: int) -> int:
        """How many of `count` units each rank has. Of fewer units than ranks, several ranks have the same one."""
        if count % self.size and self.size % count:
            raise ValueError(f"{count} units can't be divided among {self.size} ranks")
        return max(count // self.size, 1)

    def part(self, count: int, width: int = 1) -> slice:
        """This rank's part of `count` units which are `width` values wide each."""
        first = self.rank * count // self.size
        return slice(first * width, (first + self.num(count)) * width)

    def share(self, count: int) -> int:
        """How many of `count` units a rank has at most."""
        return -(-count // self.size)

    def uneven_part(self, count: int) -> slice:
        """This rank's part of `count` units, of which the last ranks may have fewer, or none."""
        most = self.share(count)
        return slice(min(self.rank * most, count), min((self.rank + 1) * most, count))
