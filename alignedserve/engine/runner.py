"""Runs one iteration: fills the step, forward, logits where a token is due, sampling.

It works in two halves. `launch` leaves a GPU with work and returns; `finish` waits for the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from alignedserve.engine.batch import Batch, BatchTable, Due
from alignedserve.engine.logprobs import token_logprobs
from alignedserve.engine.outputs import TokenLogprobs
from alignedserve.engine.request import Request
from alignedserve.engine.sampler import Draft, Sampled, Sampler
from alignedserve.ops.base import CompiledModel
from alignedserve.ops.step import StepInputs


@dataclass
class Launched:
    due: Due
    # The row of the step's hidden states for each request that is due.
    rows: torch.Tensor
    draft: Draft | None
    # The log-probabilities of prompt tokens that this iteration predicted, for requests that asked for
    # prompt_logprobs.
    prompt_logprobs: dict[Request, list[TokenLogprobs]]


class ModelRunner:
    def __init__(self, model: CompiledModel, sampler: Sampler, step: StepInputs, max_rows: int) -> None:
        self._model = model
        self._sampler = sampler
        self._step = step
        self._max_rows = max_rows

    @torch.inference_mode()
    def launch(self, table: BatchTable, batch: Batch) -> Launched:
        """Launches the iteration; called before `BatchTable.computed`."""
        ends = table.fill(self._step, batch)
        self._model.forward()
        prompt_logprobs = self._prompt_logprobs(batch, ends)
        rows = torch.from_numpy(ends[batch.due_entries] - 1)
        draft = self._sampler.begin(self._model, rows, batch.due)
        return Launched(batch.due, rows, draft, prompt_logprobs)

    @torch.inference_mode()
    def finish(self, launched: Launched) -> Sampled:
        return self._sampler.finish(self._model, launched.rows, launched.due, launched.draft)

    def _prompt_logprobs(self, batch: Batch, ends: np.ndarray) -> dict[Request, list[TokenLogprobs]]:
        found: dict[Request, list[TokenLogprobs]] = {}
        for entry in range(batch.num_decodes, len(batch.work)):
            request, count = batch.work[entry]
            if request.wants_prompt_logprobs:
                found[request] = self._chunk_logprobs(request, int(ends[entry]) - count, count)
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
            found += token_logprobs(logprobs, part, request.params.prompt_logprobs or 0)
        return found
