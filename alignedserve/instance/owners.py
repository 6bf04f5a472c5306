"""Turns of the owners of API keys among requests that wait at an instance. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeVar

AnyRequest = TypeVar("AnyRequest")


def in_turn(
    waiting: Iterable[AnyRequest], begun: Iterable[AnyRequest], owner_of: Callable[[AnyRequest], object]
) -> list[AnyRequest]:
    """Returns the waiting requests in their order, except that one of an owner that has less here goes first, as if
    each request before it had begun. `owner_of` returns what counts together."""
    num_here = Counter(map(owner_of, begun))

    def place(request: AnyRequest) -> int:
        num_here[owner_of(request)] += 1
        return num_here[owner_of(request)]

    return sorted(waiting, key=place)
