"""How a gateway predicts lengths."""

from __future__ import annotations

from dataclasses import dataclass

ENCODERS = ("hash", "sentence")
NONE = "none"
KINDS = (*ENCODERS, NONE)
MAX_ENTRIES = 8192


@dataclass(frozen=True)
class LengthConfig:
    # one of KINDS
    kind: str = "hash"
    # of sentence embeddings: a directory or a name
    model: str | None = None
    # past prompts that are kept
    max_entries: int = MAX_ENTRIES
    # what was learned is saved so often
    save_s: float = 300.0
