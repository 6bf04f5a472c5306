"""Runs one iteration: fills the step, runs the model, computes logits where a token is due, samples.

It has two halves. `launch` starts the GPU's work and returns; `finish` waits for the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import normalize

from alignedserve.engine.batch import Batch, BatchTable, Due
from alignedserve.engine.outputs import TokenLogprobs
from alignedserve.engine.request import Request
from alignedserve.engine.sampler import Draft, Sampled, Sampler, token_logprobs
from alignedserve.ops.base import CompiledModel
from alignedserve.ops.step import StepInputs


@dataclass
class Launched:
    due: Due
    # For each request that is due, its row of the step's hidden states.
    rows: torch.Tensor
    draft: Draft | None
    # Log-probabilities of the prompt tokens that this iteration predicted, for requests with prompt_logprobs.
    prompt_logprobs: dict[Request, list[TokenLogprobs]]
    # Requests with a fully computed prompt, and their embeddings.
    embedded: list[tuple[Request, torch.Tensor]]

    @property
    def requests(self) -> list[Request]:
        """The requests that get a token, and then those that get an embedding."""
        if not self.embedded:
            return self.due.requests
        return self.due.requests + [request for request, _ in self.embedded]


class ModelRunner:
    def __init__(self, model: CompiledModel, sampler: Sampler, step: StepInputs, max_rows: int) -> None:
        self._model = model
        self._sampler = sampler
        self._step = step
        self._max_rows = max_rows

    @torch.inference_mode()
    def launch(self, table: BatchTable, batch: Batch) -> Launched:
        """Launches the iteration. Called before `BatchTable.computed`."""
        ends = table.fill(self._step, batch)
        self._model.forward()
        prompt_logprobs = self._prompt_logprobs(batch, ends)
        embedded = self._embedded(batch, ends)
        rows = torch.from_numpy(ends[batch.due_entries] - 1)
        draft = self._sampler.begin(self._model, rows, batch.due)
        return Launched(batch.due, rows, draft, prompt_logprobs, embedded)

    @torch.inference_mode()
    def finish(self, launched: Launched) -> Sampled:
        sampled = self._sampler.finish(self._model, launched.rows, launched.due, launched.draft)
        self.confirm()
        return sampled

    def confirm(self) -> None:
        """Raises if a result so far may be wrong: see CompiledModel.confirm."""
        self._model.confirm()

    def _prompt_logprobs(self, batch: Batch, ends: np.ndarray) -> dict[Request, list[TokenLogprobs]]:
        found: dict[Request, list[TokenLogprobs]] = {}
        for entry in range(batch.num_decodes, len(batch.work)):
            request, count = batch.work[entry]
            if request.wants_prompt_logprobs:
                found[request] = self._chunk_logprobs(request, int(ends[entry]) - count, count)
        return found

    def _embedded(self, batch: Batch, ends: np.ndarray) -> list[tuple[Request, torch.Tensor]]:
        for entry in range(batch.num_decodes, len(batch.work)):
            request, count = batch.work[entry]
            if request.pooling == "mean":
                self._add_states(request, int(ends[entry]) - count, count)
        return [
            (batch.work[entry][0], self._embedding(batch.work[entry][0], int(ends[entry]) - 1))
            for entry in batch.embedded_entries
        ]

    def _add_states(self, request: Request, first_row: int, count: int) -> None:
        for start in range(first_row, first_row + count, self._max_rows):
            end = min(start + self._max_rows, first_row + count)
            rows = torch.arange(start, end, dtype=torch.int32)
            more = self._model.final_states(rows).sum(dim=0, dtype=torch.float64)
            request.states_sum = more if request.states_sum is None else request.states_sum + more

    def _embedding(self, request: Request, last_row: int) -> torch.Tensor:
        """Returns the embedding, of length 1. At that scale a sum of states is the same as their mean."""
        if request.pooling == "mean":
            states = request.states_sum
        else:
            states = self._model.final_states(torch.tensor([last_row], dtype=torch.int32))[0].double()
        return normalize(states, dim=0).float()

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
