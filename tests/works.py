"""Requests as the router sends them to instances."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from alignedserve.protocol.messages import Request, Work
from alignedserve.sampling_params import SamplingParams
from alignedserve.timing.deadlines import Deadlines
from alignedserve.types import PoolBlockId, RequestKey

_keys = count(1)


def make_work(
    prompt_len: int,
    output_len: int = 1,
    num_cached: int | None = None,
    max_tokens: int | None = None,
    tbt_s: float | None = None,
    key: int | None = None,
    blocks: Sequence[int] = (),
    deadlines: Deadlines | None = None,
    ttft_s: float | None = None,
    predicted_len: int = 0,
) -> Work:
    """Cached, if nothing else is said, is all but the last token."""
    request = Request(
        key=RequestKey(next(_keys) if key is None else key),
        prompt=[0] * prompt_len,
        params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0),
        seed=0,
        arrival_s=0.0,
        tbt_s=tbt_s,
        ttft_s=ttft_s,
    )
    cached = prompt_len + output_len - 1 if num_cached is None else num_cached
    return Work(
        request,
        [0] * output_len,
        cached,
        [PoolBlockId(block) for block in blocks],
        deadlines or Deadlines(),
        predicted_len,
    )
