from __future__ import annotations

import math

import pytest
import torch

from alignedserve.kernels.cpu.sampling import argmax, gumbel_argmax, gumbel_argmax_torch, gumbel_noise_torch
from tests.kernels.harness import randn

INF = float("inf")


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("width", [1, 15, 16, 64, 1003])
def test_argmax_is_the_first_maximum(rows: int, width: int) -> None:
    # few distinct values: many ties
    logits = (randn(rows, width) * 2).round()
    index, is_bad = argmax(logits)
    expected = [row.tolist().index(max(row.tolist())) for row in logits]
    assert index.tolist() == expected
    assert not is_bad.any()


@pytest.mark.parametrize("at", [0, 17, 63, 64, 99])
@pytest.mark.parametrize("value", [float("nan"), INF])
def test_argmax_flags_what_cannot_be_sampled(value: float, at: int) -> None:
    logits = randn(3, 100)
    logits[1, at] = value
    index, is_bad = argmax(logits)
    assert is_bad.tolist() == [False, True, False]
    assert 0 <= int(index[1]) < 100


def test_argmax_of_nothing_allowed_is_bad() -> None:
    _, is_bad = argmax(torch.full((1, 40), -INF))
    assert is_bad.tolist() == [True]


def test_argmax_takes_strided_rows() -> None:
    logits = randn(6, 40)
    assert torch.equal(argmax(logits[::2, :33])[0], logits[::2, :33].argmax(1))


@pytest.mark.parametrize("width", [1, 30, 1000, 4099])
def test_gumbel_agrees_with_its_reference(width: int) -> None:
    logits = randn(50, width)
    keys = torch.randint(-(2**63), 2**63 - 1, (50,), generator=torch.Generator().manual_seed(1))
    got, expected = gumbel_argmax(logits, keys), gumbel_argmax_torch(logits, keys)
    scores = logits + gumbel_noise_torch(keys, width)
    rows = torch.arange(50)
    # the same index, unless the best two are closer than the logarithms are exact
    assert (scores[rows, got] - scores[rows, expected]).abs().max() < 1e-5
    assert (got == expected).float().mean() > 0.95


def test_gumbel_noise_by_hand() -> None:
    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D & 0xFFFFFFFF
        x ^= x >> 15
        x = x * 0x846CA68B & 0xFFFFFFFF
        return x ^ x >> 16

    key, column = 0x1234_5678_9ABC_DEF0, 77
    u = (mix(mix(column ^ 0x9ABCDEF0) ^ 0x12345678) + 0.5) * 2**-32
    noise = gumbel_noise_torch(torch.tensor([key]), 100)[0, column].item()
    assert noise == pytest.approx(-math.log(-math.log1p(-u)), rel=1e-5)


def key_of_last_hash(column: int) -> int:
    """A key whose hash of `column` is the largest, which rounds to a uniform of one: `mix` undone, step by step."""
    mask, high = 0xFFFFFFFF, 0xFFFFFFFF
    high ^= high >> 16
    high = high * pow(0x846CA68B, -1, 2**32) & mask
    high ^= high >> 15 ^ high >> 30
    high = high * pow(0x7FEB352D, -1, 2**32) & mask
    high ^= high >> 16
    key = high << 32 | column
    return key if key < 2**63 else key - 2**64


def test_the_only_token_allowed_is_taken_whatever_its_noise() -> None:
    key = torch.tensor([key_of_last_hash(5)])
    assert gumbel_noise_torch(key, 6)[0, 5].item() == pytest.approx(-math.log(24 * math.log(2)), rel=1e-6)
    logits = torch.full((1, 20), -INF)
    logits[0, 5] = 0
    assert gumbel_argmax(logits, key).tolist() == [5]
    assert gumbel_argmax_torch(logits, key).tolist() == [5]


def test_gumbel_never_takes_what_is_masked() -> None:
    logits = torch.full((200, 50), -INF)
    logits[:, 31] = -50.0
    assert gumbel_argmax(logits, torch.arange(200)).tolist() == [31] * 200


def test_gumbel_samples_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.2, 0.05, 0.0])
    num = 40_000
    tokens = gumbel_argmax(
        probabilities.log().expand(num, 5).contiguous(), torch.arange(num) * 0x9E3779B97F4A7C15
    )
    frequencies = torch.bincount(tokens, minlength=5) / num
    assert (frequencies - probabilities).abs().max() < 0.01


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="logits"):
        argmax(torch.zeros(2, 3, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="logits"):
        argmax(torch.zeros(3))
    with pytest.raises(ValueError, match="logits"):
        argmax(torch.zeros(4, 3).t())
    with pytest.raises(ValueError, match="keys"):
        gumbel_argmax(torch.zeros(2, 3), torch.zeros(2))
    with pytest.raises(ValueError, match="keys"):
        gumbel_argmax(torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64))
