"""How the states of a prompt become its embedding, and how an embedding is sent between processes."""

from __future__ import annotations

from typing import Final

from alignedserve.sampling_params import SamplingParams

# The state of the last token after the final norm, or the mean over all tokens. Either is scaled to length 1.
POOLINGS: Final = ("last", "mean")
# The numpy dtype of an embedding on the wire: float32, little-endian.
DTYPE: Final = "<f4"
# The parameters of requests for embeddings, which sample nothing.
NO_SAMPLING: Final = SamplingParams(temperature=0, max_tokens=1)
