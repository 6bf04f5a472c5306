"""Inputs kept in place of KV, on the CUDA backend: on a GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from alignedserve.engine.request import NewRequest
from alignedserve.kv.held import Held
from alignedserve.kv.layout import INPUTS, PLAIN
from alignedserve.types import RequestId
from tests.engine.helpers import greedy_params, make_direct
from tests.tiny_models import greedy, prompts

Directory = Callable[[str], Path]
NUM_NEW = 4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


# One of them each time.
@pytest.mark.slow
@pytest.mark.drawn(one_in=2)
@pytest.mark.parametrize("family", ["opt", "llama-mha"])
def test_chunks_and_decodes_of_both_forms_match_transformers(tiny_model: Directory, family: str) -> None:
    """Two have inputs and two have KV: they decode beside chunks, of which some are of one token."""
    directory, indices = tiny_model(family), (1, 5, 2, 4)
    engine = make_direct(
        directory,
        attention_backend="triton",
        device=DEVICE,
        dtype="float32",
        hidden_cache=True,
        cudagraph_capture_sizes=(1, 2, 4),
    )
    requests = []
    for place, index in enumerate(indices):
        held = Held(layout=INPUTS if place < 2 else PLAIN)
        new = NewRequest(RequestId(f"r{index}"), prompts()[index], greedy_params(), 0, held=held)
        requests.append(engine.begin(new))
    running = list(requests)
    while running:
        engine.execute([(request, min(request.num_pending, 16)) for request in running])
        running = [request for request in running if len(request.output) < NUM_NEW]
    assert [request.output for request in requests] == [
        greedy(directory)[index][:NUM_NEW] for index in indices
    ]
    for request in requests:
        engine.release(request)
    engine.check_idle()
