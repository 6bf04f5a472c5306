"""Prompts that begin alike and are there at the same time: one computes what they have in common, others wait until it
has, and share it. Pure.

They come of one call with several choices, and of batch jobs whose lines have a system prompt or a document in common.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from alignedserve.deadlines import due_s
from alignedserve.messages import Work
from alignedserve.prefixes import pays_to_wait
from prefill_worker.members import Member, State


class Twins:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def had_better_wait(self, member: Member, started: Iterable[Member]) -> bool:
        """For one of these, which is computing what both need."""
        if member.work.num_cached or not _shares(member.work):
            return False
        return any(
            pays_to_wait(num_common := self._num_common(member, other), member.num_tokens)
            and other.num_computed < num_common
            for other in started
            if other.state is State.COMPUTING and _goes_first(other, member)
        )

    def _num_common(self, member: Member, other: Member) -> int:
        if other.key not in member.alike:
            member.alike[other.key] = self._num_alike(member.work, other.work)
        return member.alike[other.key]

    def _num_alike(self, work: Work, other: Work) -> int:
        """In whole blocks, without the last token: of that the output is wanted."""
        if work.request.cache_salt != other.request.cache_salt:
            return 0
        tokens, others = work.request.prompt + work.output, other.request.prompt + other.output
        return num_alike(tokens[:-1], others, self._block_size)


def num_alike(tokens: Sequence[int], others: Sequence[int], block_size: int) -> int:
    """How many tokens both begin with, in whole blocks."""
    low, high = 0, min(len(tokens), len(others)) // block_size
    while low < high:
        middle = (low + high + 1) // 2
        part = slice(low * block_size, middle * block_size)
        if tokens[part] == others[part]:
            low = middle
        else:
            high = middle - 1
    return low * block_size


def _shares(work: Work) -> bool:
    """All of the prompt is computed where its log-probabilities are wanted."""
    return work.request.params.prompt_logprobs is None or bool(work.output)


def _goes_first(other: Member, member: Member) -> bool:
    """Real time waits for no best effort, and nobody for who is in less of a hurry."""
    if other.is_rt != member.is_rt:
        return other.is_rt
    return _due_s(other) <= _due_s(member)


def _due_s(member: Member) -> float:
    return due_s(member.work.deadlines, len(member.work.output))
