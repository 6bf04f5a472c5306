"""The capacity: the rate at which instances are just busy all the time, by the cost model. Pure.

A request takes two parts of an instance's time. Its last prompt chunk yields the first token, so an answer of n tokens
is decoded in n - 1 iterations.

    prompt_s = what its prompt adds to iterations that are full of prompt tokens, including those of other prompts
    decode_s = (n - 1) * the seconds of a full batch's iteration / the requests in it

    colocated instances:           instances / (prompt_s + decode_s)
    prefill and decode instances:  the smaller of prefill instances / prompt_s and decode instances / decode_s

**The batch** is the largest that fits in memory on average. It holds requests at all stages of their answers, and more
requests with long answers. So its cost is that of a mix of lengths: all lengths at which requests decode are divided
into as many equal parts as the batch has requests, and each part is represented by its mean. A policy that takes
requests in order of arrival gets this. A policy that batches similar lengths may do better if the kernel's cost depends
on differences.

**Beside decodes**, a prompt only adds the fixed costs that decodes don't already pay, and the decodes' tokens are taken
from its iteration. With long prompts and short answers, prompts fill all iterations while the batch is smaller than
memory allows. The batch is then as large as the arriving answers keep it.

Copies of KV run beside iterations, and take less time than either part on all machines of the arena.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import NamedTuple

from alignedserve.sim.trace import Lengths
from alignedserve.timing.cost import CostModel

# The largest batch, tokens per iteration and tokens per block, as in `alignedserve simulate`.
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, BLOCK_SIZE = 256, 2048, 16
# Positions in an answer that represent all of them.
_NUM_PLACES = 4


class Layout(NamedTuple):
    num_prefill: int
    num_decode: int
    num_colocated: int

    def __str__(self) -> str:
        if self.num_colocated:
            return f"{self.num_colocated} colocated"
        return f"{self.num_prefill} + {self.num_decode}"


@dataclass(frozen=True)
class Fitting:
    """The throughput of a layout's instances with requests of these lengths, if they are always busy."""

    cost: CostModel
    layout: Layout
    lengths: Sequence[Lengths]
    max_num_seqs: int = MAX_NUM_SEQS

    @cached_property
    def rate(self) -> float:
        """Requests per second."""
        num_prefill, num_decode, num_colocated = self.layout
        if num_colocated:
            return num_colocated / (self.prompt_s + self.decode_s)
        if not self.decode_s:
            return num_prefill / self.prompt_s
        return min(num_prefill / self.prompt_s, num_decode / self.decode_s)

    @cached_property
    def batch(self) -> list[int]:
        """Lengths of the requests that decode at the same time."""
        return batch_of(self.lengths, self._batch_size) if self.num_decodes else []

    @cached_property
    def prompt_s(self) -> float:
        """Mean seconds that a prompt adds."""
        return fmean(map(self.seconds_of_prompt, self.lengths))

    def seconds_of_prompt(self, lengths: Lengths) -> float:
        """Seconds that this prompt adds."""
        chunk = MAX_NUM_BATCHED_TOKENS - len(self._beside)
        chunks_s = sum(self.cost.chunk_s(*part) for part in _chunks(lengths.prompt, chunk))
        return self._token_s * lengths.prompt + chunks_s

    @cached_property
    def _token_s(self) -> float:
        """Seconds that a prompt's token adds, without what differs between chunks: what they attend to."""
        beside = self._beside
        chunk = MAX_NUM_BATCHED_TOKENS - len(beside)
        added_s = self.cost.iteration([(0, chunk)], beside) - self.cost.iteration([], beside)
        return (added_s - self.cost.chunk_s(0, chunk)) / chunk

    @property
    def _beside(self) -> list[int]:
        return self.batch if self.layout.num_colocated else []

    @cached_property
    def decode_s(self) -> float:
        """Mean seconds of an instance for decoding an answer."""
        return self.num_decodes * self.full_s / len(self.batch) if self.batch else 0.0

    @cached_property
    def num_decodes(self) -> float:
        """Mean iterations in which a request decodes."""
        return fmean(each.output - 1 for each in self.lengths)

    # ---- durations of a request
    # -----------------------------------------------------------------------------------------

    @cached_property
    def full_s(self) -> float:
        """Seconds of a full batch's iteration, without prompts."""
        return self.cost.iteration([], self.batch)

    @cached_property
    def alone_s(self) -> float:
        """Seconds of an iteration with one request of mean length."""
        return self.cost.iteration([], [round(fmean(self.batch or [self._prompt]))])

    @cached_property
    def first_s(self) -> float:
        """Seconds to the first token of a mean prompt that is computed alone."""
        return self.cost.fastest_ttft_s(round(self._prompt), MAX_NUM_BATCHED_TOKENS)

    @cached_property
    def first_among_others_s(self) -> float:
        """The same in iterations full of prompt tokens, beside the decodes of a colocated instance."""
        beside = self._beside
        chunk = MAX_NUM_BATCHED_TOKENS - len(beside)
        num_chunks = -(-round(self._prompt) // chunk)
        return sum(self.cost.iteration([(k * chunk, chunk)], beside) for k in range(num_chunks))

    @property
    def answer_s(self) -> float:
        """Seconds from the arrival of a mean request to its last token, in a full batch and without waiting."""
        return self.first_s + self.num_decodes * self.full_s

    # ---- the batch --------------------------------------------------------------------------------------------------

    @property
    def _prompt(self) -> float:
        return fmean(each.prompt for each in self.lengths)

    @property
    def _batch_size(self) -> int:
        # The last block of each request is half full.
        held = _mean_length(self.lengths) + BLOCK_SIZE / 2
        most = min(self.max_num_seqs, self.cost.num_kv_tokens / held)
        if self.layout.num_colocated:
            # Prompt tokens that are computed per iteration and decoding request.
            prompt_tokens = self._prompt / self.num_decodes
            most = min(most, MAX_NUM_BATCHED_TOKENS / (1 + prompt_tokens))
        return max(1, int(most))


def batch_of(lengths: Sequence[Lengths], num_requests: int) -> list[int]:
    """Returns the lengths of `num_requests` decoding requests: the means of equal parts of all lengths at which
    requests decode, the shortest first. Some answer must have more than one token."""
    places = sorted(_places(lengths))
    part = sum(weight for _, weight in places) / num_requests
    batch, left, total = list[int](), part, 0.0
    for length, weight in places:
        while weight >= left and len(batch) < num_requests:
            batch.append(round((total + length * left) / part))
            weight, left, total = weight - left, part, 0.0
        left, total = left - weight, total + length * weight
    if len(batch) < num_requests:  # Sums of weights are not exact.
        batch.append(round(total / (part - left)))
    return batch


def _places(lengths: Sequence[Lengths]) -> Iterator[tuple[float, float]]:
    """Yields lengths at which requests decode, each with the number of iterations that it represents."""
    for each in lengths:
        num_decodes = each.output - 1
        for place in range(_NUM_PLACES if num_decodes else 0):
            yield each.prompt + 0.5 + (place + 0.5) / _NUM_PLACES * num_decodes, num_decodes / _NUM_PLACES


def _mean_length(lengths: Sequence[Lengths]) -> float:
    places = [*_places(lengths)]
    return sum(length * weight for length, weight in places) / sum(weight for _, weight in places)


def _chunks(num_tokens: int, most: int) -> Iterator[tuple[int, int]]:
    for before in range(0, num_tokens, most):
        yield before, min(most, num_tokens - before)
