"""A compiled model on a CPU: two programs, and the struct that describes the current step to them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from alignedserve.kernels.cpu.program import Program, Rows, Value
from alignedserve.kernels.cpu.ranks import RankMemory
from alignedserve.kernels.cpu.structs import Op
from alignedserve.ops.base import CompiledModel
from alignedserve.ops.step import StepInputs


@dataclass(frozen=True)
class Programs:
    """A model's recorded functions, each with its result."""

    forward: Program
    hidden: Value
    logits: Program
    # The result of `logits`.
    result: torch.Tensor
    final_states: tuple[Program, Value] | None = None


class CpuModel(CompiledModel):
    def __init__(
        self,
        step: StepInputs,
        programs: Programs,
        max_rows: int,
        num_threads: int | None,
        ranks: RankMemory | None = None,
    ) -> None:
        """`ranks`: the memory that programs of all ranks share."""
        _check_step(step)
        self._step = step
        self._programs = programs
        self._max_rows = max_rows
        self._num_threads = num_threads
        self._ranks = ranks
        self._struct = step.struct()

    def forward(self) -> torch.Tensor:
        step = self._step
        if not (0 <= step.num_tokens <= step.max_tokens and 0 <= step.num_seqs <= step.max_seqs):
            raise ValueError(
                f"num_tokens and num_seqs must be at most {step.max_tokens} and {step.max_seqs}, "
                f"not {step.num_tokens} and {step.num_seqs}"
            )
        step.describe(self._struct)
        self._run(self._programs.forward)
        hidden = self._programs.hidden
        return hidden.tensor[: step.num_outputs if hidden.rows is Rows.OUTPUTS else step.num_tokens]

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        self._choose(rows)
        self._run(self._programs.logits)
        return self._programs.result[: len(rows)]

    def final_states(self, rows: torch.Tensor) -> torch.Tensor:
        if self._programs.final_states is None:
            raise RuntimeError("compiled without final_states")
        program, states = self._programs.final_states
        self._choose(rows)
        self._run(program)
        return states.tensor[: len(rows)].float()

    def _choose(self, rows: torch.Tensor) -> None:
        if (
            rows.dtype != torch.int32
            or rows.dim() != 1
            or not rows.is_contiguous()
            or rows.device.type != "cpu"
        ):
            raise ValueError(
                f"rows must be a contiguous int32 vector on the CPU, not {rows.dtype} {tuple(rows.shape)}"
            )
        if len(rows) > self._max_rows:
            raise ValueError(f"rows must be at most {self._max_rows}, not {len(rows)}")
        self._struct.num_rows, self._struct.rows = len(rows), rows.data_ptr()

    def profile(self, rows: torch.Tensor) -> list[tuple[Op, float]]:
        """Runs the step and the logits of `rows`. Returns every operation with its seconds."""
        timed: list[tuple[Op, float]] = []
        forward, logits = self._programs.forward, self._programs.logits
        self.forward()
        timed += zip(forward.ops, forward.profile(self._struct), strict=True)
        self.logits(rows)
        timed += zip(logits.ops, logits.profile(self._struct), strict=True)
        return timed

    def _run(self, program: Program) -> None:
        self._struct.num_threads = self._num_threads or torch.get_num_threads()
        program.run(self._struct)
        if self._ranks:
            self._ranks.check()


def _check_step(step: StepInputs) -> None:
    names = ("token_ids", "positions", "query_start", "context_len", "is_reversed", "flat_block_table")
    tensors = {name: getattr(step, name) for name in (*names, "outputs")}
    for name, tensor in (tensors | {"slots": step.slots[0]}).items():
        if tensor.dtype != torch.int32 or tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous int32 on the CPU, not {tensor.dtype} on {tensor.device}"
            )
