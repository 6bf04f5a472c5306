from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

from alignedserve.kernels.triton.truncate import BLOCK, truncate, truncate_reference
from alignedserve.ops.truncate import truncate as truncate_row
from alignedserve.sampling_params import SamplingParams
from tests.kernels.triton.harness import DEVICE, apart, ints, randn

pytestmark = pytest.mark.slow

INF = float("inf")
# temperature, top_k, top_p, min_p
Settings = tuple[float, int, float, float]
SETTINGS: list[Settings] = [
    *itertools.product([0.7], [0, 1, 40], [1.0, 0.9, 0.01], [0.0, 0.05]),
    (0.0, 5, 0.5, 0.5),
    (2.0, 10_000_000, 0.999, 0.0),
    (0.01, 3, 0.5, 0.0),
]


def floats(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=DEVICE)


def truncated(logits: torch.Tensor, settings: list[Settings]) -> torch.Tensor:
    temperature, top_k, top_p, min_p = zip(*settings, strict=True)
    result = apart(logits)
    truncate(result, floats(temperature), ints(*top_k), floats(top_p), floats(min_p))
    return result


def assert_truncated(actual: torch.Tensor, logits: torch.Tensor, settings: Settings) -> None:
    """As the reference has it, unless a sum of probabilities is top_p but for float32's rounding."""
    temperature, top_k, top_p, min_p = settings
    least = truncate_reference(logits, temperature, top_k, top_p - (top_p < 1) * 1e-5, min_p)
    most = truncate_reference(logits, temperature, top_k, top_p + (top_p < 1) * 1e-5, min_p)
    is_kept = actual > -INF
    assert (is_kept | (least == -INF)).all(), settings
    assert (~is_kept | (most > -INF)).all(), settings
    torch.testing.assert_close(actual[is_kept], most[is_kept], rtol=1e-6, atol=0)


@pytest.mark.parametrize("width", [1, 7, 300, BLOCK + 5])
@pytest.mark.parametrize("has_ties", [False, True])
def test_every_row_is_cut_as_it_asks(width: int, has_ties: bool) -> None:
    settings = SETTINGS if width == 300 else SETTINGS[::4]
    logits = randn(len(settings), width) * 3
    if has_ties:
        logits = logits.round()
    result = truncated(logits, settings)
    for row, asked in enumerate(settings):
        assert_truncated(result[row], logits[row], asked)


def test_reference_is_what_the_sampler_does() -> None:
    for temperature, top_k, top_p, min_p in SETTINGS:
        if temperature > 0:
            logits = torch.randn(500) * 3
            expected = truncate_reference(logits, temperature, top_k, top_p, min_p)
            truncate_row(
                logits, SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
            )
            assert torch.equal(logits, expected)


def test_what_is_forbidden_stays_forbidden() -> None:
    logits = randn(4, 50)
    logits[:, 10:] = -INF
    result = truncated(
        logits, [(0.5, 20, 1.0, 0.0), (0.5, 0, 0.999, 0.0), (0.5, 5, 0.9, 0.1), (0.5, 1, 1.0, 0.0)]
    )
    assert (result[:, 10:] == -INF).all()
    assert torch.equal(result[0, :10], logits[0, :10] / 0.5)
    assert (result > -INF).any(dim=1).all()


def test_ties_are_kept_together_across_zero() -> None:
    row = [0.0, -0.0, 0.0, -1.0, -0.0]
    result = truncated(torch.tensor([row, row], device=DEVICE), [(1.0, 1, 1.0, 0.0), (1.0, 0, 0.2, 0.0)])
    assert result.tolist() == [[0, 0, 0, -INF, 0]] * 2


def test_a_row_does_not_depend_on_its_company() -> None:
    logits = randn(3, 400)
    settings = [(0.8, 30, 0.9, 0.02), (1.1, 0, 0.7, 0.0), (1.0, 3, 1.0, 0.0)]
    together = truncated(logits, settings)
    for row in range(3):
        assert torch.equal(truncated(logits[row : row + 1], settings[row : row + 1])[0], together[row])


def test_wrong_arguments_are_named() -> None:
    logits, ones = torch.zeros(2, 8), torch.ones(2)
    count = torch.zeros(2, dtype=torch.int32)
    for name, arguments in {
        "logits": (logits.half(), ones, count, ones, ones),
        "temperature": (logits, ones[:1], count, ones, ones),
        "top_k": (logits, ones, ones, ones, ones),
        "top_p": (logits, ones, count, ones.double(), ones),
        "min_p": (logits, ones, count, ones, torch.ones(3)),
    }.items():
        with pytest.raises(ValueError, match=f"^{name} must"):
            truncate(*arguments)
