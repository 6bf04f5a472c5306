"""The results of embed, shaped like vLLM's, and their computation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from alignedserve.offline.local_instance import LocalInstance
from alignedserve.protocol.pooling import DTYPE, NO_SAMPLING
from alignedserve.types import RequestId


@dataclass
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass
class EmbeddingRequestOutput:
    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput = field(default_factory=lambda: EmbeddingOutput([]))
    finished: bool = False


def embeddings_of(
    instance: LocalInstance,
    asked: Sequence[EmbeddingRequestOutput],
    pooling: str,
    tell: Callable[[int], object],
    adapters: Sequence[str],
) -> list[EmbeddingRequestOutput]:
    """Fills in the outputs and returns them. Raises the error of a prompt that can't run.

    `tell` is called after each step with the number of finished prompts. `adapters` are the adapters' names, one for
    each prompt; an empty name is none.
    """
    results = {RequestId(each.request_id): each for each in asked}
    for (request_id, each), adapter in zip(results.items(), adapters, strict=True):
        instance.add_request(
            request_id, each.prompt_token_ids, NO_SAMPLING, seed=0, pooling=pooling, adapter=adapter
        )
    while instance.num_unfinished:
        ended = [event for event in instance.step() if event.finish_reason]
        for event in ended:
            if event.error is not None:
                raise event.error
            result = results[event.request_id]
            result.outputs = EmbeddingOutput(np.frombuffer(event.embedding, DTYPE).tolist())
            result.finished = True
        tell(len(ended))
    return [*asked]
