"""A compiled model on a GPU: steps of decodes as CUDA graphs over a ladder of batch sizes, all others launched as they
come.

A graph holds a whole step: hidden states, logits, the likeliest token of each row, and the copy of those to the host.
So a greedy step costs the host one launch, and reading the tokens is the only time that it waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tqdm import tqdm

from alignedserve.engine.ops.base import CompiledModel
from alignedserve.engine.step import StepInputs
from kernels.triton.host_copy import send_tokens

Argmax = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class CapturedStep:
    graph: torch.cuda.CUDAGraph
    hidden: torch.Tensor
    logits: torch.Tensor


class CudaModel(CompiledModel):
    def __init__(
        self,
        forward: Callable[[], torch.Tensor],
        logits: Callable[[torch.Tensor], torch.Tensor],
        argmax: Argmax,
        step: StepInputs,
        max_rows: int,
    ) -> None:
        self._forward = forward
        self._logits = logits
        self._argmax = argmax
        self._step = step
        self._max_rows = max_rows
        self._graphs: dict[int, CapturedStep] = {}
        # of the step that ran last, if it was a graph
        self._captured: CapturedStep | None = None
        self._hidden: torch.Tensor | None = None
        is_cuda = step.token_ids.is_cuda
        self._tokens = torch.empty(max_rows, dtype=torch.int32, pin_memory=is_cuda)

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int], use_tqdm: bool) -> None:
        """The largest first: the others then fit into the memory that it took."""
        pool = None
        for size in tqdm(sorted(sizes, reverse=True), "CUDA graphs", disable=not use_tqdm):
            self._step.padded_sizes = [size]
            self._step.commit_padding()
            # kernels are compiled, and libraries set up, by a run that is not captured
            self._run_all()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                hidden, logits = self._run_all()
            pool = graph.pool()
            self._graphs[size] = CapturedStep(graph, hidden, logits)
        self._step.padded_sizes = sorted(sizes)

    def _run_all(self) -> tuple[torch.Tensor, torch.Tensor]:
        self._step.upload()
        hidden = self._forward()
        logits = self._logits(hidden)
        tokens, is_broken = self._argmax(logits)
        send_tokens(tokens, is_broken, self._tokens)
        return hidden, logits

    @torch.inference_mode()
    def forward(self) -> torch.Tensor:
        step = self._step
        self._captured = self._graphs.get(step.num_rows) if step.is_decode else None
        if self._captured is None:
            step.upload()
            step.mark_sent()
            self._hidden = self._forward()[: step.num_outputs]
        else:
            self._captured.graph.replay()
            step.mark_sent()
            self._hidden = self._captured.hidden[: step.num_outputs]
        return self._hidden

    @torch.inference_mode()
    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        if self._hidden is None:
            raise RuntimeError("logits come after a forward")
        if len(rows) > self._max_rows:
            raise ValueError(f"rows must be at most {self._max_rows}, not {len(rows)}")
        if self._captured is not None and len(rows) == self._step.num_outputs:
            return self._captured.logits[: len(rows)].float()
        # ascending as they are, these are all of them
        if len(rows) == len(self._hidden):
            return self._logits(self._hidden).float()
        return self._logits(self._hidden[rows.to(self._hidden.device).long()]).float()

    def likeliest(self, num_rows: int) -> np.ndarray | None:
        if self._captured is None or num_rows != self._step.num_outputs:
            return None
        self._step.wait_until_sent()
        return self._tokens[:num_rows].numpy()
