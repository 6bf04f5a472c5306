"""How the states of a prompt become its embedding, and how that crosses a process."""

from __future__ import annotations

from typing import Final

from alignedserve.sampling_params import SamplingParams

# Of the states that the prompt's tokens have after the final norm: that of the last one, or the mean of all. Either is
# scaled to length 1.
POOLINGS: Final = ("last", "mean")
# How an embedding's numbers are sent, in numpy's words: float32, little-endian.
DTYPE: Final = "<f4"
# Of requests for embeddings, which sample nothing.
NO_SAMPLING: Final = SamplingParams(temperature=0, max_tokens=1)
