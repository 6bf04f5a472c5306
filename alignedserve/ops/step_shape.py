"""The sizes of a step, and the few sizes that steps are padded to, so that each can be captured once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter


@dataclass(frozen=True)
class StepShape:
    """The sizes that are launched for a step: its own, or those that it is padded to."""

    num_tokens: int
    num_outputs: int
    # Leading sequences that the kernels for one token read. They skip a chunk among them.
    num_decodes: int
    # The last sequences, which compute more than one token.
    num_chunks: int = 0
    # Tokens of the longest chunk, of the longest context of a chunk, and of all chunks' contexts.
    max_chunk_len: int = 0
    max_context_len: int = 0
    num_context_tokens: int = 0

    @property
    def is_decode(self) -> bool:
        """Whether the rows of outputs are the rows of tokens."""
        return self.num_chunks == 0 and self.num_tokens == self.num_outputs

    def holds(self, other: StepShape) -> bool:
        """Whether a step of the other shape can be padded to this one."""
        return (
            self.num_tokens >= other.num_tokens
            and self.num_outputs >= other.num_outputs
            and self.num_decodes >= other.num_decodes + other.num_chunks
            and self.num_chunks >= other.num_chunks
            and self.max_chunk_len >= other.max_chunk_len
            and self.max_context_len >= other.max_context_len
            and self.num_context_tokens >= other.num_context_tokens
        )


class Ladder:
    """The shapes that steps are padded to, separately for decodes and for all other steps."""

    def __init__(self, shapes: Iterable[StepShape] = ()) -> None:
        ascending = sorted(shapes, key=attrgetter("num_tokens"))
        self._rungs = {
            is_decode: [shape for shape in ascending if shape.is_decode == is_decode]
            for is_decode in (True, False)
        }

    def rung(self, shape: StepShape) -> StepShape:
        """The smallest shape with at least as many tokens, if it holds the step; otherwise the shape itself."""
        rungs = self._rungs[shape.is_decode]
        at = bisect_left(rungs, shape.num_tokens, key=attrgetter("num_tokens"))
        return rungs[at] if at < len(rungs) and rungs[at].holds(shape) else shape
