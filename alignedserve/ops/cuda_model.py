"""A compiled model on a GPU: CUDA graphs for steps of a few shapes. Other steps are launched kernel by kernel.

A graph holds a whole step: hidden states, logits, the likeliest token of each row, and its copy to the host. A greedy
step therefore costs the host one launch, and it waits only to read the tokens. A graph of decodes also fetches the
inputs. With prompts, inputs are sent before the graph. The host may then write the next inputs while the graph runs,
which matters because many chunks yield no token to wait for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch
from tqdm import tqdm

from alignedserve.kernels.triton.host_copy import send_tokens
from alignedserve.ops.base import CompiledModel
from alignedserve.ops.step import StepInputs
from alignedserve.ops.step_shape import Ladder, StepShape

Argmax = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

log = logging.getLogger(__name__)


class CudaModel(CompiledModel):
    def __init__(
        self,
        forward: Callable[[], torch.Tensor],
        logits: Callable[[torch.Tensor], torch.Tensor],
        argmax: Argmax,
        step: StepInputs,
        max_rows: int,
        final_states: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._forward = forward
        self._logits = logits
        self._final_states = final_states
        self._argmax = argmax
        self._step = step
        self._max_rows = max_rows
        self._graphs: dict[StepShape, torch.cuda.CUDAGraph] = {}
        # Hidden states and logits of the latest graph. All graphs write them here.
        self._captured: tuple[torch.Tensor, torch.Tensor] | None = None
        self._is_captured = False
        # Hidden states of the latest step.
        self._hidden: torch.Tensor | None = None
        is_cuda = step.token_ids.is_cuda
        # Recorded after the latest graph.
        self._done = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
        self._tokens = torch.empty(max_rows, dtype=torch.int32, pin_memory=is_cuda)

    @torch.inference_mode()
    def capture(self, shapes: Sequence[StepShape], use_tqdm: bool) -> None:
        """Captures these shapes. From now on, steps are padded to them. The largest goes first: the others then fit
        into its memory."""
        largest_first = sorted(shapes, key=lambda shape: (shape.is_decode, shape.num_tokens), reverse=True)
        for shape in tqdm(largest_first, "CUDA graphs", disable=not use_tqdm):
            try:
                self._graphs[shape] = self._captured_step(shape)
            except RuntimeError as error:
                if shape.is_decode:
                    raise
                log.warning("Steps with prompts in them are launched kernel by kernel: %s", error)
                break
        self._step.ladder = Ladder(self._graphs)

    def _captured_step(self, shape: StepShape) -> torch.cuda.CUDAGraph:
        self._step.commit_empty(shape)
        self._step.upload()
        # An uncaptured run compiles kernels and initialises libraries.
        hidden, logits = self._run_all()
        if self._captured is None:
            rows = self._max_rows
            self._captured = (
                hidden.new_empty(rows, hidden.shape[1]),
                logits.new_empty(rows, logits.shape[1]),
            )
        del hidden, logits
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=next(iter(self._graphs.values())).pool() if self._graphs else None):
            if shape.is_decode:
                self._step.upload()
            for out, value in zip(self._captured, self._run_all(), strict=True):
                out[: len(value)].copy_(value)
        return graph

    def _run_all(self) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self._forward()
        logits = self._logits(hidden)
        tokens, is_broken = self._argmax(logits)
        send_tokens(tokens, is_broken, self._tokens)
        return hidden, logits

    @torch.inference_mode()
    def forward(self) -> torch.Tensor:
        step = self._step
        graph = None if step.is_special else self._graphs.get(step.shape)
        self._is_captured = graph is not None
        fetches_inputs = graph is not None and step.shape.is_decode
        if not fetches_inputs:
            step.upload()
            step.mark_sent()
        hidden = self._forward() if graph is None else self._replay(graph)
        if fetches_inputs:
            step.mark_sent()
        self._hidden = hidden[: step.num_outputs]
        return self._hidden

    def _replay(self, graph: torch.cuda.CUDAGraph) -> torch.Tensor:
        assert self._captured is not None and self._done is not None
        graph.replay()
        self._done.record()
        return self._captured[0]

    @torch.inference_mode()
    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        if self._hidden is None:
            raise RuntimeError("logits needs a forward before it")
        if len(rows) > self._max_rows:
            raise ValueError(f"rows must be at most {self._max_rows}, not {len(rows)}")
        # Rows are ascending, so equally many rows are all of them.
        if len(rows) == len(self._hidden):
            if self._is_captured and self._captured is not None:
                return self._captured[1][: len(rows)].float()
            return self._logits(self._hidden).float()
        return self._logits(self._hidden[rows.to(self._hidden.device).long()]).float()

    @torch.inference_mode()
    def final_states(self, rows: torch.Tensor) -> torch.Tensor:
        if self._hidden is None:
            raise RuntimeError("final_states needs a forward before it")
        return self._final_states(self._hidden[rows.to(self._hidden.device).long()]).float()

    def likeliest(self, num_rows: int) -> np.ndarray | None:
        if not self._is_captured or num_rows != self._step.num_outputs or self._done is None:
            return None
        self._done.synchronize()
        return self._tokens[:num_rows].numpy()
