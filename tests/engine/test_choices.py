"""What the launcher, the pool and instances conclude from settings and a model's config alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from alignedserve.engine.build import check_decode_kernel
from alignedserve.engine.choices import (
    block_format,
    choose_layer_groups,
    choose_max_model_len,
    choose_num_blocks,
    span_of_requests,
)
from alignedserve.engine.config import EngineConfig
from alignedserve.kernels.cpu.library import loaded
from alignedserve.kv.groups import one_group
from alignedserve.models.config import ModelConfig
from alignedserve.models.presets import PRESETS

GEMMA, GPT_OSS, LLAMA = PRESETS["gemma-3-4b"], PRESETS["gpt-oss-20b"], PRESETS["llama-3.1-8b"]
SLIDING = replace(LLAMA, sliding_windows=LLAMA.num_layers * (4096,))


def config(**options: Any) -> EngineConfig:
    return replace(EngineConfig("model", load_format="dummy", device="cpu", max_model_len=8192), **options)


def test_layers_that_slide_have_groups_of_their_own() -> None:
    gemma = choose_layer_groups(config(), GEMMA, share_blocks=False)
    assert (gemma.num_full, gemma.num_sliding, gemma.num_layers, gemma.window) == (1, 6, 5, 1024)
    gpt_oss = choose_layer_groups(config(), GPT_OSS, share_blocks=False)
    assert (gpt_oss.num_full, gpt_oss.num_sliding, gpt_oss.num_layers, gpt_oss.window) == (1, 1, 12, 128)
    form = block_format(config(), GEMMA, "bfloat16")
    # k and v, 4 heads, 16 slots, 256 values of two bytes
    assert (form.num_layers, form.num_groups, form.block_bytes) == (5, 7, 5 * 2 * 4 * 16 * 256 * 2)
    assert form.column_bytes == 7 * form.block_bytes


def test_layers_of_one_kind_are_one_group() -> None:
    assert choose_layer_groups(config(), LLAMA, share_blocks=False) == one_group(32)
    assert choose_layer_groups(config(), SLIDING, share_blocks=False) == one_group(32, 4096)
    assert block_format(config(), SLIDING, "bfloat16") == block_format(config(), LLAMA, "bfloat16")


@pytest.mark.parametrize("model", [GEMMA, SLIDING])
@pytest.mark.parametrize(
    ("options", "share_blocks"),
    [({"hidden_cache": True}, False), ({}, True), ({"max_model_len": 1024}, False)],
)
def test_blocks_for_all_tokens_are_of_all_layers(
    model: ModelConfig, options: dict[str, object], share_blocks: bool
) -> None:
    assert choose_layer_groups(config(**options), model, share_blocks) == one_group(model.num_layers)
    assert block_format(config(**options), model, "bfloat16", share_blocks).num_layers == model.num_layers


def test_a_window_counts_where_a_request_may_be_longer_than_it() -> None:
    assert choose_layer_groups(config(max_model_len=1025), GEMMA, share_blocks=False).num_groups == 7


def test_an_instance_has_room_for_all_groups_of_its_longest_request() -> None:
    form = block_format(config(), GEMMA, "bfloat16")
    span = span_of_requests(config(), choose_layer_groups(config(), GEMMA, False), has_whole_prompts=True)
    needed = 7 * 8192 // 16
    wanted = config(max_num_seqs=3)
    assert choose_num_blocks(wanted, form, 8192, (needed + 5) * form.block_bytes, span) == needed + 5
    assert choose_num_blocks(wanted, form, 8192, 9 * needed * form.block_bytes, span) == 3 * needed
    message = rf"{needed - 1} blocks of .* needs {needed}\. Allow at least {needed * form.block_bytes} bytes"
    with pytest.raises(ValueError, match=message + f".*at most {8192 - 16}"):
        choose_num_blocks(wanted, form, 8192, (needed - 1) * form.block_bytes, span)


def test_what_frees_what_it_has_passed_needs_room_for_what_is_left() -> None:
    """Of 8,192 tokens, the 1,024 of the window with their tile, and 512 of an iteration."""
    wanted = config(max_num_batched_tokens=512, max_num_seqs=1)
    form = block_format(wanted, GEMMA, "bfloat16")
    span = span_of_requests(wanted, choose_layer_groups(wanted, GEMMA, False), has_whole_prompts=False)
    needed = 8192 // 16 + 6 * (-(-(1024 + 62 + 512) // 16) + 1)
    assert choose_num_blocks(wanted, form, 8192, needed * form.block_bytes, span) == needed
    # More than one request has are for KV of earlier prompts.
    assert choose_num_blocks(wanted, form, 8192, 1 << 40, span) == 7 * 8192 // 16
    with pytest.raises(ValueError, match=f"{needed - 1} blocks of .* needs {needed}.* at most {8192 - 16}"):
        choose_num_blocks(wanted, form, 8192, (needed - 1) * form.block_bytes, span)


def test_lengths_whose_tables_fit_no_machine_are_refused() -> None:
    # Llama 4's, of 10 million tokens, are the longest.
    longest = replace(LLAMA, max_position=10 << 20)
    assert choose_max_model_len(config(max_model_len=None), longest) == 10 << 20
    absurd = replace(LLAMA, max_position=2**31 - 1)
    with pytest.raises(ValueError, match=r"max_model_len=2147483647: the tables .* take \d+ GiB"):
        choose_max_model_len(config(max_model_len=None), absurd)
    assert choose_max_model_len(config(), absurd) == 8192


def test_shared_decode_attention_needs_the_native_code_that_makes_its_plans(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check_decode_kernel(EngineConfig("a model", decode_kernel="shared"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("ALIGNEDSERVE_CACHE_DIR", str(tmp_path))
    loaded.cache_clear()
    try:
        check_decode_kernel(EngineConfig("a model"))
        with pytest.raises(ValueError, match=r"decode_kernel='shared': .*no-such-compiler"):
            check_decode_kernel(EngineConfig("a model", decode_kernel="shared"))
    finally:
        loaded.cache_clear()
