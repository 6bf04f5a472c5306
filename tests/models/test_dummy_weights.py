from __future__ import annotations

import pytest
import torch

from alignedserve.models.dummy_weights import BLOCK_LENGTH, DummySource


def test_a_tensor_depends_on_seed_and_name_and_not_on_order() -> None:
    first, second = DummySource(torch.float32, "cpu", 1), DummySource(torch.float32, "cpu", 1)
    names = ["a.weight", "b.weight"]
    forward = {name: first.take(name, (7, 5)) for name in names}
    backward = {name: second.take(name, (7, 5)) for name in reversed(names)}
    assert all(torch.equal(forward[name], backward[name]) for name in names)
    assert not torch.equal(forward["a.weight"], forward["b.weight"])
    assert not torch.equal(forward["a.weight"], DummySource(torch.float32, "cpu", 2).take("a.weight", (7, 5)))


@pytest.mark.parametrize("seed", [0, -1, 2**70])
def test_any_integer_is_a_seed(seed: int) -> None:
    assert DummySource(torch.float32, "cpu", seed).take("a.weight", (2,)).shape == (2,)


@pytest.mark.parametrize(
    "name",
    ["model.norm.weight", "l.self_attn_layer_norm.weight", "l.input_layernorm.weight", "l.q_norm.weight"],
)
def test_norms_are_ones(name: str) -> None:
    assert DummySource(torch.bfloat16, "cpu", 0).take(name, (4,)).tolist() == [1] * 4


def test_biases_are_zeros() -> None:
    source = DummySource(torch.bfloat16, "cpu", 0)
    assert source.take("l.q_proj.bias", (4,)).tolist() == [0] * 4
    assert source.take("l.final_layer_norm.bias", (4,)).tolist() == [0] * 4


def test_a_large_tensor_is_normal_throughout_and_its_rows_differ() -> None:
    shape = (3000, 1024)
    assert shape[0] * shape[1] > 2 * BLOCK_LENGTH
    weight = DummySource(torch.float32, "cpu", 0).take("lm_head.weight", shape)
    assert weight.std().item() == pytest.approx(0.02, rel=0.01)
    assert weight.mean().item() == pytest.approx(0, abs=1e-4)
    assert len({tuple(row) for row in weight[:, :8].tolist()}) == len(weight)


def test_only_a_block_of_numbers_is_drawn() -> None:
    """Drawing all of them takes minutes for eight billion."""
    weight = DummySource(torch.float32, "cpu", 0).take("embed.weight", (2 * BLOCK_LENGTH + 3,))
    assert torch.equal(weight[:BLOCK_LENGTH], weight[BLOCK_LENGTH : 2 * BLOCK_LENGTH])
    assert torch.equal(weight[:3], weight[-3:])


def test_tensors_begin_at_places_of_one_block_that_their_names_decide() -> None:
    """Drawing a block for each of a mixture's 18,432 experts' tensors takes minutes."""
    source = DummySource(torch.float32, "cpu", 0)
    one, two = (source.take(f"{name}.weight", (BLOCK_LENGTH,)) for name in "ab")
    places = (two == one[0]).nonzero().flatten().tolist()
    assert any(torch.equal(one, two.roll(-place)) for place in places if place != 0)


def test_each_expert_has_numbers_of_its_own() -> None:
    take = DummySource(torch.bfloat16, "cpu", 0).of_experts("l.experts.gate", 128, 3, 64)
    rows = torch.cat([take(number) for number in range(128)])
    assert len({tuple(row) for row in rows.tolist()}) == len(rows)


def test_a_tensor_in_fewer_bits_is_the_same_rounded() -> None:
    whole, short = (
        DummySource(dtype, "cpu", 0).take("a.weight", (999,)) for dtype in (torch.float32, torch.bfloat16)
    )
    assert torch.equal(whole.to(torch.bfloat16), short)
