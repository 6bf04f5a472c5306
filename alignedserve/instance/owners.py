"""Turns of the owners of API keys among requests that wait at an instance. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeVar

AnyRequest = TypeVar("AnyRequest")


def in_turn(
    waiting: Iterable[AnyRequest], begun: Iterable[AnyRequest], whose: Callable[[AnyRequest], object]
) -> list[AnyRequest]:
    """Returns the waiting requests in their order, except that one whose owner has less here goes first, as if each
    request before it had begun. `whose` returns the owner."""
    num_here = Counter(map(whose, begun))

    def place(request: AnyRequest) -> int:
        num_here[whose(request)] += 1
        return num_here[whose(request)]

    return sorted(waiting, key=place)
