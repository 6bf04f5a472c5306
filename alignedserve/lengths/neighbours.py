"""Past prompts and the lengths of their answers. When there are too many, the least recently used are removed.

The index is usearch's: Apache-2.0, wheels for every Python from 3.11 on and for all platforms, frequent releases. Two
other libraries were compared, but only usearch removes single entries in place. The last release of hnswlib is from
2023, as source only, and it only hides deleted entries. The other one, faiss, takes 64 MB, brings its own OpenMP, and
can't delete from its graphs.

Up to EXACT entries it compares all of them. That takes 0.2 ms for 8192 entries. After many evictions the graph took 0.1
ms, but found only 70 % of the true neighbours.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from usearch.index import Index

from alignedserve.lengths.prediction import Vector

EXACT = 16384
# Answers to the same prompt that are averaged with equal weight; beyond that, older ones fade.
MAX_ANSWERS = 8
# The index's resolution. A stored vector and the same vector computed again have the same bytes.
STORED = np.float16


@dataclass(frozen=True, slots=True)
class Answers:
    """The lengths of the answers to one prompt."""

    # The mean length of answers that ended by themselves; 0: there were none.
    length: float
    num_ended: int
    # The greatest length at which answers were cut off; 0: none was.
    cut_at: int = 0

    def with_one(self, length: int, is_cut: bool) -> Answers:
        if is_cut:
            return Answers(self.length, self.num_ended, max(self.cut_at, length))
        num_ended = min(self.num_ended + 1, MAX_ANSWERS)
        return Answers(self.length + (length - self.length) / num_ended, num_ended, self.cut_at)


NO_ANSWERS = Answers(0.0, 0)


@dataclass(frozen=True, slots=True)
class SimilarPrompt:
    similarity: float
    answers: Answers


class Neighbours:
    def __init__(self, dim: int, max_entries: int) -> None:
        self._index = Index(ndim=dim, metric="ip", dtype="f16")
        self._max_entries = max_entries
        # The answers to each prompt, the least recently used first.
        self._answers: OrderedDict[int, Answers] = OrderedDict()
        self._keys: dict[bytes, int] = {}
        self._vectors: dict[int, bytes] = {}
        self._next_key = 0

    def __len__(self) -> int:
        return len(self._answers)

    def near(self, vector: Vector, count: int, threshold: float) -> list[SimilarPrompt]:
        """Returns the answers to the most similar prompts, the most similar first.

        Ties with the last of `count` are included; otherwise the index's order would decide which of them are found.
        """
        if not self._answers:
            return []
        is_exact = len(self) <= EXACT
        found = self._index.search(vector.astype(STORED), 2 * count, threads=1, exact=is_exact)
        similarities = [1.0 - distance for distance in found.distances.tolist()]
        least = max(threshold, similarities[min(count, len(similarities)) - 1])
        near = []
        for key, similarity in zip(found.keys.tolist(), similarities, strict=True):
            if similarity >= least:
                self._answers.move_to_end(key)
                near.append(SimilarPrompt(similarity, self._answers[key]))
        return near

    def remember(self, vector: Vector, length: int, is_cut: bool) -> None:
        stored = vector.astype(STORED).tobytes()
        key = self._keys.get(stored)
        answers = NO_ANSWERS if key is None else self._answers[key]
        self.put(stored, answers.with_one(length, is_cut))

    def put(self, stored: bytes, answers: Answers) -> None:
        """Stores the answers as the most recently used."""
        key = self._keys.get(stored)
        if key is None:
            key = self._add(stored)
        self._answers[key] = answers
        self._answers.move_to_end(key)

    def entries(self) -> Iterator[tuple[bytes, Answers]]:
        """Yields the entries, the least recently used first."""
        return ((self._vectors[key], answers) for key, answers in self._answers.items())

    def _add(self, stored: bytes) -> int:
        if len(self) >= self._max_entries:
            self.evict()
        key, self._next_key = self._next_key, self._next_key + 1
        vector: NDArray[np.float16] = np.frombuffer(stored, dtype=STORED)
        self._index.add(key, vector, threads=1)
        self._keys[stored], self._vectors[key] = key, stored
        return key

    def evict(self) -> None:
        """Removes the least recently used entry."""
        key, _ = self._answers.popitem(last=False)
        self._index.remove(key)
        del self._keys[self._vectors.pop(key)]
