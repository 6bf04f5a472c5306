from __future__ import annotations

from typing import Any

import pytest
import torch

from alignedserve.kernels.triton.gather_kv import gather_kv
from alignedserve.kernels.triton.rope_write import rope_write, rope_write_reference
from alignedserve.ops.torch_attention import head_norm, rotate
from tests.kernels.triton.harness import DEVICE, DTYPES, apart, assert_close, ints, poison, randn

LAYERS, BLOCKS = 3, 7


def rope_table(head_dim: int, max_position: int = 50) -> torch.Tensor:
    angles = torch.rand(max_position, head_dim // 2) * 6.3
    return torch.cat([angles.cos(), angles.sin()], dim=1).to(DEVICE)


def make_cache(kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    return poison(BLOCKS, LAYERS, 2, kv_heads, block_size, head_dim, dtype=dtype)


def check(
    qkv: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor, heads: int, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Runs kernel and reference; compares all they write, and that they write nothing else. q, the reference's k,
    positions."""
    num_tokens, head_dim = len(qkv), cache.shape[5]
    positions = torch.randint(0, 50, (num_tokens,), dtype=torch.int32, device=DEVICE)
    positions[slots < 0] = 0
    q_out = poison(num_tokens, heads, head_dim, dtype=qkv.dtype)
    expected_cache = cache.clone()
    expected = rope_write_reference(qkv, positions, slots, expected_cache, 1, heads, **options)
    assert rope_write(qkv, positions, slots, cache, 1, heads, q_out=q_out, **options) is q_out
    assert_close(q_out, expected[0])
    written = ~expected_cache.isnan()
    assert torch.equal(~cache.isnan(), written)
    assert_close(cache[written], expected_cache[written])
    return q_out, expected[1], positions


@pytest.mark.drawn(one_in=4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 64, 80, 96, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 6), (9, 3)])
def test_rotates_and_writes(dtype: torch.dtype, head_dim: int, heads: int, kv_heads: int) -> None:
    qkv = randn(5, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    cache = make_cache(kv_heads, 4, head_dim, dtype)
    check(qkv, ints(0, 27, 5, -1, 12), cache, heads, rope=rope_table(head_dim))


@pytest.mark.drawn(one_in=5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_rope", [True, False])
@pytest.mark.parametrize("with_norm", [True, False])
def test_is_what_the_torch_backend_computes(dtype: torch.dtype, with_rope: bool, with_norm: bool) -> None:
    rope = rope_table(96) if with_rope else None
    q_norm, k_norm = (randn(96, dtype=dtype) if with_norm else None for _ in range(2))
    qkv = apart(randn(3, (4 + 2 * 2) * 96, dtype=dtype))
    cache = make_cache(2, 16, 96, dtype)
    options = dict(rope=rope, q_norm=q_norm, k_norm=k_norm, eps=1e-4)
    q_out, k_out, positions = check(qkv, ints(3, 16, 100), cache, 4, **options)
    heads = qkv.view(3, 8, 96)
    assert_close(q_out, rotate(head_norm(heads[:, :4], q_norm, 1e-4), positions.long(), rope))
    assert_close(k_out, rotate(head_norm(heads[:, 4:6], k_norm, 1e-4), positions.long(), rope))


@pytest.mark.drawn(one_in=3)
@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize("rotary_dim", [2, 48, 72, 94])
def test_a_part_of_each_head_is_rotated(rotary_dim: int, with_norm: bool) -> None:
    rope = rope_table(rotary_dim)
    q_norm, k_norm = (randn(96) if with_norm else None for _ in range(2))
    qkv, cache = randn(3, (4 + 2 * 2) * 96), make_cache(2, 16, 96, torch.float32)
    options = dict(rope=rope, q_norm=q_norm, k_norm=k_norm, eps=1e-4)
    q_out, k_out, positions = check(qkv, ints(3, 16, 100), cache, 4, **options)
    heads = qkv.view(3, 8, 96)
    assert_close(q_out, rotate(head_norm(heads[:, :4], q_norm, 1e-4), positions.long(), rope))
    assert_close(k_out, rotate(head_norm(heads[:, 4:6], k_norm, 1e-4), positions.long(), rope))
    if not with_norm:
        assert torch.equal(q_out[..., rotary_dim:], heads[:, :4, rotary_dim:])


def test_many_tokens_take_wide_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignedserve.kernels.triton.rope_write.FEW_TOKENS", 2)
    cache = make_cache(1, 4, 20, torch.float16)
    qkv = randn(4, (17 + 2) * 20, dtype=torch.float16)
    check(qkv, ints(0, 27, 5, -1), cache, 17, rope=rope_table(20))


def test_without_norm_and_rotation() -> None:
    qkv, cache = randn(2, 4 * 8), make_cache(1, 4, 8, torch.float32)
    q = rope_write(qkv, ints(0, 0), ints(1, 2), cache, 0, 2)
    assert torch.equal(q, qkv[:, :16].view(2, 2, 8))
    assert torch.equal(cache[0, 0, 1, 0, 1:3], qkv[:, 24:])


def test_padding_writes_nothing_and_reads_no_position() -> None:
    cache = make_cache(1, 4, 8, torch.float32)
    q = rope_write(randn(2, 24), ints(2**31 - 1, -7), ints(-1, -1), cache, 2, 1, rope=rope_table(8))
    assert cache.isnan().all() and q.isfinite().all()


def test_blocks_and_layers_may_lie_apart() -> None:
    cache = poison(BLOCKS, LAYERS + 2, 2, 1, 4, 8)[:, 1:4]
    check(randn(3, 24), ints(0, 27, 5), cache, 1)


def test_no_tokens() -> None:
    cache = make_cache(1, 4, 8, torch.float32)
    assert rope_write(randn(0, 24), ints(), ints(), cache, 0, 1).shape == (0, 1, 8)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("qkv", dict(qkv=torch.zeros(2, 32))),
        ("qkv", dict(qkv=torch.zeros(24, 2).t())),
        ("qkv", dict(qkv=torch.zeros(2, 24, dtype=torch.int32))),
        ("positions", dict(positions=torch.zeros(2))),
        ("slots", dict(slots=torch.zeros(3, dtype=torch.int32))),
        ("cache", dict(cache=torch.zeros(7, 3, 2, 1, 4, 8, dtype=torch.float16))),
        ("cache", dict(cache=torch.zeros(7, 3, 2, 4, 1, 8).transpose(3, 4))),
        ("layer", dict(layer=3)),
        ("rope", dict(rope=torch.zeros(50, 10))),
        ("rope", dict(rope=torch.zeros(50, 3))),
        ("k_norm", dict(k_norm=torch.zeros(4))),
        ("q_out", dict(q_out=torch.zeros(2, 8))),
    ],
)
def test_wrong_arguments_are_named(name: str, change: dict[str, Any]) -> None:
    arguments = dict(
        qkv=torch.zeros(2, 24),
        positions=torch.zeros(2, dtype=torch.int32),
        slots=torch.zeros(2, dtype=torch.int32),
        cache=torch.zeros(7, 3, 2, 1, 4, 8),
        layer=0,
        num_heads=1,
    )
    with pytest.raises(ValueError, match=f"^{name} must"):
        rope_write(**{**arguments, **change})


def test_addresses_beyond_32_bits() -> None:
    block = 2 * 4 * 8
    stride = 2**29 + 16
    memory = torch.empty(4 * stride + block, dtype=torch.float16, device=DEVICE)
    cache = memory.as_strided((5, 1, 2, 1, 4, 8), (stride, block, 4 * 8, 4 * 8, 8, 1))
    qkv = randn(1, 24, dtype=torch.float16)
    rope_write(qkv, ints(0), ints(4 * 4 + 3), cache, 0, 1)
    assert torch.equal(cache[4, 0, 0, 0, 3], qkv[0, 8:16])
    k, v = (poison(20, 1, 8, dtype=torch.float16) for _ in range(2))
    gather_kv(cache, 0, ints(0, 1, 2, 3, 4), ints(5), ints(0), ints(0, 20), k, v)
    assert torch.equal(k[19, 0], qkv[0, 8:16]) and torch.equal(v[19, 0], qkv[0, 16:])
