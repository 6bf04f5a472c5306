"""The configuration of a gateway's length prediction. The text beside a field is its help on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

ENCODERS = ("hash", "sentence")
NONE = "none"
KINDS = (*ENCODERS, NONE)
MAX_ENTRIES = 8192


@dataclass(frozen=True)
class LengthConfig:
    predictor: Annotated[str, "predictor of answer lengths; sentence uses embeddings", KINDS, "expert"] = (
        "hash"
    )
    predictor_model: Annotated[
        str | None, "model for sentence embeddings, a directory or a name [default: all-MiniLM-L6-v2]"
    ] = None
    predictor_entries: Annotated[int, "past prompts that the length predictor remembers"] = MAX_ENTRIES
    corpus: Annotated[str | None, "file of prompts and answers to learn lengths from at the start"] = None
    # The seconds between two saves of what was learned.
    save_s: float = 300.0

    def __post_init__(self) -> None:
        if self.predictor not in KINDS:
            raise ValueError(f"length_predictor={self.predictor!r}: must be one of {', '.join(KINDS)}")
        if self.corpus is not None and self.predictor == NONE:
            raise ValueError("length_corpus: needs a length_predictor")
        if not 1 <= self.predictor_entries <= 1 << 20:
            raise ValueError(
                f"length_predictor_entries={self.predictor_entries}: must be from 1 to {1 << 20}"
            )
