"""What every part works with: the device, the remaining time, and the results."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.record import Record, Row


@dataclass(frozen=True)
class Options:
    # EngineConfig.attention_backend
    backend: str = "auto"
    # The values of EngineConfig.decode_kernel to compare, if it has that field. The first is used where none are
    # compared.
    decode_kernels: tuple[str, ...] = ("balanced", "plain")
    # The presets to measure; empty: all.
    models: tuple[str, ...] = ()
    # EngineConfig.quantization, for `step` and `experts`.
    quantization: str | None = None
    # Tiny models and sizes, to try the scripts out without a GPU.
    is_tiny: bool = False


@dataclass
class Bench:
    device: torch.device
    out: Path
    record: Record
    options: Options
    # The time.monotonic() at which the current part, and the whole run, must end.
    part_deadline: float
    deadline: float
    part: str = ""
    # Results of `ceilings`: bytes or operations per second by name.
    ceilings: dict[str, float] = field(default_factory=dict)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def seconds_left(self) -> float:
        return min(self.part_deadline, self.deadline) - time.monotonic()

    def pick(self, full: int, tiny: int) -> int:
        return tiny if self.options.is_tiny else full

    def models(self, *names: str) -> list[str]:
        """Returns those of a part's models that were asked for."""
        return [name for name in names if not self.options.models or name in self.options.models]

    def has_time(self, case: str, needs_s: float) -> bool:
        if self.seconds_left >= needs_s:
            return True
        self._add(case, {"skipped": True, "summary": f"skipped: {self.seconds_left:.0f} s left"}, 0.0)
        return False

    def case(
        self, name: str, measure: Callable[..., Row], *arguments: Any, needs_s: float = 3.0
    ) -> Row | None:
        """Measures and records one case. A failure is recorded too, and returns None so that the next case can run."""
        if not self.has_time(name, needs_s):
            return None
        begin, row = time.monotonic(), None
        try:
            row = measure(*arguments)
            recorded = row
        except Exception:
            recorded = {"error": traceback.format_exc()}
        self._add(name, recorded, time.monotonic() - begin)
        free_memory()
        return row

    def fail(self, name: str) -> None:
        """Records the exception being handled."""
        self._add(name, {"error": traceback.format_exc()}, 0.0)

    def _add(self, case: str, row: Row, took_s: float) -> None:
        self.record.add({"part": self.part, "case": case, "took_s": round(took_s, 2), **row})
        print(self.record.table().rpartition("\n")[2], flush=True)

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)


def free_memory() -> None:
    """Frees GPU memory. Does nothing on a CPU, where garbage collection takes longer than a tiny case."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
