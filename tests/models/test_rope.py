"""Tables equal those of transformers for any config.json."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from alignedserve.models.hf_config import model_config_from_dict
from alignedserve.models.rope import rope_table
from tests.models.test_hf_config import LLAMA3_ROPE, SIZES

HEAD_DIM = 64
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


def ours(values: dict[str, Any], architecture: str, max_len: int) -> torch.Tensor:
    config = model_config_from_dict({"architectures": [architecture], **values})
    assert config.rope is not None
    return rope_table(config.rope, config.head_dim, max_len)


def check(
    values: dict[str, Any], config_class: Any = LlamaConfig, max_len: int = 700, seq_len: int | None = None
) -> None:
    values = SIZES | {"head_dim": HEAD_DIM, "max_position_embeddings": 1024} | values
    oracle = config_class(**json.loads(json.dumps(values)))
    kind = oracle.rope_parameters["rope_type"]
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](oracle, torch.device("cpu"), seq_len=seq_len)
    angles = torch.arange(max_len).float()[:, None] * frequencies
    expected = torch.cat([angles.cos() * scale, angles.sin() * scale], dim=1)
    found = ours(values, f"{config_class.__name__.removesuffix('Config')}ForCausalLM", max_len)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "llama3", **LLAMA3_ROPE},
        YARN,
        YARN | {"factor": None},
        YARN | {"rope_theta": 1e6, "factor": 40, "beta_fast": 16, "beta_slow": 2.5},
        YARN | {"beta_fast": 64.0, "original_max_position_embeddings": 4096, "truncate": False},
        YARN | {"attention_factor": 1.25},
        YARN | {"mscale": 0.707, "mscale_all_dim": 1.3},
        YARN | {"mscale": 1.0},
        YARN | {"mscale": 1.0, "mscale_all_dim": 0},
        YARN | {"factor": 0.5},
        # All frequencies turn often, and none does.
        YARN | {"original_max_position_embeddings": 10**8, "rope_theta": 2.0},
        YARN | {"original_max_position_embeddings": 2},
        {"rope_type": "yarn", "factor": 2.0},
    ],
    ids=str,
)
def test_scalings(rope: dict[str, Any]) -> None:
    check({"rope_scaling": rope})


def test_a_length_at_the_top_goes_first() -> None:
    check({"rope_scaling": YARN, "original_max_position_embeddings": 512})


PHI3 = {
    "head_dim": HEAD_DIM,
    "num_attention_heads": 4,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 128,
}
LONG = {"short_factor": [1 + i / 16 for i in range(24)], "long_factor": [2 + i for i in range(24)]}


@pytest.mark.parametrize("kind", ["longrope", "yarn"])
@pytest.mark.parametrize(
    "changes", [{}, {"factor": 3.0}, {"factor": 0.5}, {"attention_factor": 1.7}], ids=str
)
def test_longrope_has_factors_for_short_models_and_for_long_ones(kind: str, changes: dict[str, Any]) -> None:
    values = PHI3 | {"rope_scaling": {"type": kind, **LONG, **changes}}
    check(values, Phi3Config, max_len=128, seq_len=128)
    check(values, Phi3Config, max_len=129, seq_len=129)


def test_the_first_name_of_longrope_is_known() -> None:
    """transformers means to read it, and fails."""
    one, other = (
        ours(SIZES | PHI3 | {"rope_scaling": {"type": kind, **LONG}}, "Phi3ForCausalLM", 200)
        for kind in ("su", "longrope")
    )
    assert torch.equal(one, other)


def test_phi3_has_an_original_length_of_its_own() -> None:
    rope = {"type": "longrope", "original_max_position_embeddings": 99, **LONG}
    values = {"num_attention_heads": 4, "partial_rotary_factor": 0.75, "rope_scaling": rope}
    check(values | {"max_position_embeddings": 8192}, Phi3Config, max_len=200)
