"""Runs one iteration's work: fill the step, forward, logits where a token is due, sample."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from alignedserve.engine.batch import BatchTable, Work
from alignedserve.engine.logprobs import TokenLogprobs, token_logprobs
from alignedserve.engine.ops.base import CompiledModel
from alignedserve.engine.request import Request
from alignedserve.engine.sampler import Sampled, Sampler
from alignedserve.engine.step import StepInputs


@dataclass
class IterationResult:
    # requests that caught up, and so got a token
    requests: list[Request]
    sampled: Sampled
    # for requests that asked for prompt_logprobs: those of the prompt tokens that this iteration predicted
    prompt_logprobs: dict[Request, list[TokenLogprobs]] = field(default_factory=dict)


class ModelRunner:
    def __init__(self, model: CompiledModel, sampler: Sampler, step: StepInputs, max_rows: int) -> None:
        self._model = model
        self._sampler = sampler
        self._step = step
        self._max_rows = max_rows

    @torch.inference_mode()
    def run(self, table: BatchTable, work: Work) -> IterationResult:
        work = decodes_first(work)
        ends = table.fill(self._step, work)
        self._model.forward()
        prompt_logprobs = self._prompt_logprobs(work, ends)
        due = [i for i, (request, count) in enumerate(work) if count == request.num_pending]
        requests = [work[i][0] for i in due]
        if not due:
            return IterationResult([], Sampled([]), prompt_logprobs)
        rows = torch.from_numpy(ends[due] - 1)
        sampled = self._sampler.sample(self._model, rows, requests)
        return IterationResult(requests, sampled, prompt_logprobs)

    def _prompt_logprobs(self, work: Work, ends: np.ndarray) -> dict[Request, list[TokenLogprobs]]:
        found: dict[Request, list[TokenLogprobs]] = {}
        for (request, count), end in zip(work, ends.tolist(), strict=True):
            if request.wants_prompt_logprobs:
                found[request] = self._chunk_logprobs(request, end - count, count)
        return found

    def _chunk_logprobs(self, request: Request, first_row: int, count: int) -> list[TokenLogprobs]:
        """Position p predicts prompt token p + 1; the last position predicts the first output token instead."""
        first = request.num_computed
        targets = request.prompt[first + 1 : first + count + 1].tolist()
        found = []
        for start in range(0, len(targets), self._max_rows):
            part = targets[start : start + self._max_rows]
            rows = torch.arange(first_row + start, first_row + start + len(part), dtype=torch.int32)
            logprobs = self._model.logits(rows).log_softmax(dim=-1)
            num_likeliest = request.params.prompt_logprobs or 0
            found += [
                token_logprobs(row, token, num_likeliest) for row, token in zip(logprobs, part, strict=True)
            ]
        return found


def decodes_first(work: Work) -> Work:
    """What computes one token before what computes more: a GPU's kernels want each kind in one piece."""
    return sorted(work, key=lambda item: item[1] != 1)
