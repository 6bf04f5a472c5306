"""The adapter of each row of a step (`ops/adapters.py`)."""

from __future__ import annotations

import numpy as np
import torch


class StepAdapters:
    """The part of a step's inputs about adapters. On a GPU each buffer is filled in pinned memory."""

    def __init__(self, max_tokens: int, device: torch.device | str) -> None:
        # Whether any row of the step has an adapter. If none has, the buffers keep old contents.
        self.is_any = False
        self._num_tokens = self._num_outputs = 0
        # The adapter number of each token of the step, and of each of its outputs; 0: none.
        self.tokens, self._host_tokens = _buffer(max_tokens, device)
        self.outputs, self._host_outputs = _buffer(max_tokens, device)

    def clear(self) -> None:
        """Sets up a step without adapters."""
        self.is_any = False

    def fill(self, numbers: np.ndarray, counts: np.ndarray, outputs: np.ndarray) -> None:
        """`numbers`: the adapter of each sequence. `counts`: its tokens. `outputs`: the step's outputs."""
        self.fill_rows(np.repeat(numbers, counts), outputs)

    def fill_rows(self, of_tokens: np.ndarray, outputs: np.ndarray) -> None:
        """`of_tokens`: the adapter of each token."""
        self._num_tokens, self._num_outputs = len(of_tokens), len(outputs)
        self._host_tokens.numpy()[: len(of_tokens)] = of_tokens
        self._host_outputs.numpy()[: len(outputs)] = of_tokens[outputs]
        self.is_any = bool(of_tokens.any())

    @property
    def filled_rows(self) -> np.ndarray:
        """The tokens' adapters given to `fill_rows`; empty if no row has an adapter."""
        rows: np.ndarray = self._host_tokens.numpy()[: self._num_tokens if self.is_any else 0]
        return rows

    def upload(self) -> None:
        """Sends the host's buffers to the device, on the current stream."""
        if self.is_any and self.tokens is not self._host_tokens:
            self.tokens[: self._num_tokens].copy_(self._host_tokens[: self._num_tokens], non_blocking=True)
            self.outputs[: self._num_outputs].copy_(
                self._host_outputs[: self._num_outputs], non_blocking=True
            )

    def of_rows(self, num_rows: int) -> torch.Tensor:
        """Returns the adapters of a value's rows, which are the step's tokens or its outputs. Outputs ascend, so if
        they are as many as the tokens, they are all tokens."""
        if num_rows == self._num_tokens:
            return self.tokens[:num_rows]
        if num_rows != self._num_outputs:
            raise RuntimeError(
                f"{num_rows} rows are neither the step's {self._num_tokens} tokens nor its {self._num_outputs} outputs"
            )
        return self.outputs[:num_rows]


def _buffer(size: int, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    tensor = torch.zeros(size, dtype=torch.int32, device=device)
    return tensor, tensor if tensor.device.type == "cpu" else torch.zeros_like(
        tensor, device="cpu"
    ).pin_memory()
