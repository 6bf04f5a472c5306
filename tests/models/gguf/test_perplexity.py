"""Published files have the perplexity that transformers computes with float32: with float32 the same one, and with rows
of eight bits nearly so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests import real_weights
from tests.perplexity import by_this_engine, by_transformers, perplexity, windows_of

pytestmark = [pytest.mark.slow, pytest.mark.drawn(one_in=8, turn=2)]

# One window, longer than that of Gemma's layers.
NUM_TOKENS = 1500


@pytest.mark.parametrize("find", [real_weights.smollm2, real_weights.gemma3])
def test_perplexity_is_that_of_transformers(find: Callable[[], Path]) -> None:
    path = find()
    windows = windows_of(path, NUM_TOKENS, NUM_TOKENS)
    [expected] = by_transformers(path, windows)
    assert 5 < perplexity(expected) < 200
    [plain] = by_this_engine(path, windows, "float32")
    assert perplexity(plain) == pytest.approx(perplexity(expected), rel=1e-4)
    [rounded] = by_this_engine(path, windows, "auto")
    assert perplexity(rounded) == pytest.approx(perplexity(expected), rel=0.01)
    # The root mean square of a token's difference. llama.cpp has 0.08 with the first file.
    rms = np.sqrt(np.mean((np.array(rounded) - np.array(plain)) ** 2))
    assert 0 < rms < 0.15
