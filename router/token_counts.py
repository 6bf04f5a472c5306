"""Token counts per request, with sums per class. Pure.

The sums are read at each event, so reading them must take as long for one request as for thousands.
"""

from __future__ import annotations

from collections.abc import Iterator

from alignedserve.types import RequestKey


class TokenCounts:
    def __init__(self) -> None:
        # (tokens, whether the request is real time) of each request
        self._tokens: dict[RequestKey, tuple[int, bool]] = {}
        self._counts = {True: 0, False: 0}
        self._sums = {True: 0, False: 0}

    def __len__(self) -> int:
        return len(self._tokens)

    def __iter__(self) -> Iterator[RequestKey]:
        return iter(self._tokens)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._tokens

    def put(self, key: RequestKey, num_tokens: int, is_rt: bool) -> None:
        """Counts the request with `num_tokens` from now on, whatever it counted before."""
        self.discard(key)
        self._tokens[key] = num_tokens, is_rt
        self._counts[is_rt] += 1
        self._sums[is_rt] += num_tokens

    def discard(self, key: RequestKey) -> None:
        """Safe to repeat."""
        if found := self._tokens.pop(key, None):
            num_tokens, is_rt = found
            self._counts[is_rt] -= 1
            self._sums[is_rt] -= num_tokens

    def count(self, is_rt: bool) -> int:
        """Returns the number of requests of the class."""
        return self._counts[is_rt]

    def sum(self, is_rt: bool) -> int:
        """Returns the number of tokens of the class."""
        return self._sums[is_rt]

    @property
    def total(self) -> int:
        return self._sums[True] + self._sums[False]
