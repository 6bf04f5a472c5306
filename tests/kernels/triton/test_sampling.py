from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from alignedserve.kernels.cpu.sampling import _mix, gumbel_argmax_torch, gumbel_noise_torch
from alignedserve.kernels.triton.sampling import (
    FEW_ROWS,
    PIECE_OF_FEW,
    argmax,
    argmax_reference,
    exponential,
    gumbel_argmax,
    gumbel_noise,
    mix,
    sample,
)
from tests.kernels.test_sampling import key_of_last_hash
from tests.kernels.triton.harness import DEVICE, DTYPES, apart, poison, randn

INF = float("inf")
WIDTHS = [1, 30, PIECE_OF_FEW, 3 * PIECE_OF_FEW + 5]


def random_keys(num: int) -> torch.Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (num,), device=DEVICE)


@pytest.mark.drawn(one_in=5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [0, 1, FEW_ROWS + 1])
def test_argmax_is_the_first_maximum(dtype: torch.dtype, width: int, rows: int) -> None:
    # few distinct values: many ties
    logits = apart((randn(rows, width) * 2).round().to(dtype))
    index, is_broken = argmax(logits)
    assert index.tolist() == [row.index(max(row)) for row in logits.tolist()]
    assert torch.equal(index, argmax_reference(logits)[0])
    assert is_broken.dtype == torch.bool and not is_broken.any()


@pytest.mark.drawn(one_in=5)
@pytest.mark.parametrize("at", [0, 17, PIECE_OF_FEW, PIECE_OF_FEW + 98])
@pytest.mark.parametrize("value", [float("nan"), INF])
@pytest.mark.parametrize("dtype", DTYPES)
def test_argmax_flags_what_cannot_be_sampled(value: float, at: int, dtype: torch.dtype) -> None:
    logits = randn(3, PIECE_OF_FEW + 99, dtype=dtype)
    logits[0, at] = -INF
    logits[1, at] = value
    index, is_broken = argmax(logits)
    assert is_broken.tolist() == [False, True, False]
    assert torch.equal(is_broken, argmax_reference(logits)[1])
    assert 0 <= int(index[1]) < logits.shape[1]


@pytest.mark.parametrize("value", [-INF, float("nan"), INF])
def test_rows_with_nothing_to_choose_stay_in_the_vocabulary(value: float) -> None:
    logits = torch.full((2, PIECE_OF_FEW + 3), value, device=DEVICE)
    index, is_broken = argmax(logits)
    assert index.tolist() == [0, 0] and is_broken.all()
    assert gumbel_argmax(logits, random_keys(2)).max() < logits.shape[1]


@pytest.mark.drawn(one_in=3)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [0, 2, FEW_ROWS + 4])
def test_gumbel_takes_the_reference_s_tokens(width: int, rows: int) -> None:
    logits, keys = apart(randn(rows, width)), random_keys(rows)
    got, expected = gumbel_argmax(logits, keys), gumbel_argmax_torch(logits, keys)
    scores = logits + gumbel_noise_torch(keys, width)
    every = torch.arange(rows, device=DEVICE)
    # the same token, unless the best two are closer than the logarithms are exact
    assert ((scores[every, got] - scores[every, expected]).abs() < 1e-5).all()
    assert (got == expected).sum() >= rows - 1


@pytest.mark.parametrize("rows", [0, 3, FEW_ROWS + 4])
def test_sample_is_both_in_one(rows: int) -> None:
    logits, keys = apart(randn(rows, PIECE_OF_FEW + 5) * 2), random_keys(rows)
    temperature = torch.rand(rows, device=DEVICE) + 0.5
    temperature[::2] = 0
    if rows:
        logits[0, 7], logits[1, 7], logits[2, 7] = float("nan"), INF, -INF
    tokens, is_broken = sample(logits, keys, temperature)
    greedy, expected_broken = argmax(logits)
    assert torch.equal(is_broken, expected_broken) and is_broken.sum() == min(rows, 2)
    random = gumbel_argmax((logits / temperature.unsqueeze(1)).contiguous(), keys)
    expected = torch.where(temperature > 0, random, greedy)
    assert torch.equal(tokens[~is_broken], expected[~is_broken])


def test_the_only_token_allowed_is_taken_whatever_its_noise() -> None:
    logits = torch.full((1, 20), -INF, device=DEVICE)
    logits[0, 5] = 0
    key = torch.tensor([key_of_last_hash(5)], device=DEVICE)
    assert gumbel_argmax(logits, key).tolist() == [5]
    token, is_broken = sample(logits, key, torch.ones(1, device=DEVICE))
    assert token.tolist() == [5] and not is_broken.item()


@triton.jit
def noise_kernel(key, hashes, noise, WIDTH: tl.constexpr):
    columns = tl.arange(0, WIDTH)
    tl.store(hashes + columns, mix(columns.to(tl.uint32) ^ 0xDEADBEEF).to(tl.int64))
    tl.store(noise + columns, gumbel_noise(columns, tl.load(key)))


def test_noise_is_the_reference_s() -> None:
    width, key = 4096, random_keys(1)
    hashes, noise = torch.full((width,), -1, device=DEVICE), poison(width)
    noise_kernel[(1,)](key, hashes, noise, width)
    assert torch.equal(hashes, _mix(torch.arange(width, device=DEVICE) ^ 0xDEADBEEF))
    expected = gumbel_noise_torch(key, width)[0]
    torch.testing.assert_close(noise, expected, rtol=1e-6, atol=1e-6)


@triton.jit
def exponential_kernel(uniform, out, WIDTH: tl.constexpr):
    columns = tl.arange(0, WIDTH)
    tl.store(out + columns, exponential(tl.load(uniform + columns)))


def test_small_values_keep_their_digits() -> None:
    tiny = 2.0 ** -torch.arange(3, 34, dtype=torch.float32)
    uniform = torch.cat([tiny, torch.linspace(0.24, 0.26, 32), torch.rand(449)]).to(DEVICE)
    out = poison(512)
    exponential_kernel[(1,)](uniform, out, 512)
    torch.testing.assert_close(out.double(), -torch.log1p(-uniform.double()), rtol=1e-6, atol=0)


def test_gumbel_never_takes_what_is_masked() -> None:
    logits = torch.full((20, 50), -INF, device=DEVICE)
    logits[:, 31] = -50.0
    logits[:, 40] = float("nan")
    assert gumbel_argmax(logits, random_keys(20)).tolist() == [31] * 20


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("logits", (torch.zeros(3), torch.zeros(3, dtype=torch.int64))),
        ("logits", (torch.zeros(3, 4).t(), torch.zeros(4, dtype=torch.int64))),
        ("logits", (torch.zeros(3, 4).int(), torch.zeros(3, dtype=torch.int64))),
        ("keys", (torch.zeros(3, 4), torch.zeros(3))),
        ("keys", (torch.zeros(3, 4), torch.zeros(4, dtype=torch.int64))),
    ],
)
def test_wrong_arguments_are_named(name: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=f"^{name} must"):
        gumbel_argmax(*arguments)
    temperature = torch.ones(len(arguments[0]))
    with pytest.raises(ValueError, match=f"^{name} must"):
        sample(arguments[0], arguments[1], temperature)
    if name == "logits":
        with pytest.raises(ValueError, match="^logits must"):
            argmax(arguments[0])


def test_temperature_is_checked() -> None:
    with pytest.raises(ValueError, match="^temperature must"):
        sample(torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64), torch.ones(3).double())
