from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from alignedserve.models import weights
from alignedserve.models.safetensors_source import SafetensorsSource

TENSORS = {
    "model.embed.weight": torch.arange(40.0).view(10, 4),
    "model.norm.weight": torch.tensor([1.0, -2.0, 3.5]),
    "model.half.weight": torch.tensor([[0.5, 65504.0]], dtype=torch.float16),
    "model.brain.weight": torch.full((3, 2), 1 / 3, dtype=torch.bfloat16),
    "model.empty.weight": torch.zeros(0, 4),
}


def open_source(directory: Path, dtype: torch.dtype = torch.float32) -> SafetensorsSource:
    return SafetensorsSource(directory, dtype, "cpu", progress=False)


def save_sharded(directory: Path) -> None:
    names = list(TENSORS)
    shards = {"model-00001-of-00002.safetensors": names[:2], "model-00002-of-00002.safetensors": names[2:]}
    for shard, members in shards.items():
        save_file({name: TENSORS[name] for name in members}, directory / shard)
    weight_map = {name: shard for shard, members in shards.items() for name in members}
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def write_raw(path: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_arrive_whole_and_in_the_dtype_asked_for(
    tmp_path: Path, is_sharded: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # so small that conversion goes in several pieces, the last of them odd
    monkeypatch.setattr(weights, "CONVERT_BYTES", 12)
    save_sharded(tmp_path) if is_sharded else save_file(TENSORS, tmp_path / "model.safetensors")
    source = open_source(tmp_path, dtype)
    for name, tensor in reversed(TENSORS.items()):
        taken = source.take(name, tuple(tensor.shape))
        assert taken.dtype == dtype
        assert torch.equal(taken, tensor.to(dtype))
    source.finish()


def test_a_view_stays_readable_after_the_next_take_and_after_finish(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    source = open_source(tmp_path)
    unconverted = {name: tensor for name, tensor in TENSORS.items() if tensor.dtype == torch.float32}
    views = {name: source.take(name, tuple(tensor.shape)) for name, tensor in unconverted.items()}
    with pytest.raises(ValueError, match="2 tensors"):
        source.finish()
    del source
    assert all(torch.equal(views[name], tensor) for name, tensor in unconverted.items())


def test_a_single_file_goes_before_an_index(tmp_path: Path) -> None:
    save_sharded(tmp_path)
    save_file({"other": torch.ones(1)}, tmp_path / "model.safetensors")
    assert open_source(tmp_path).take("other", (1,)).item() == 1


@pytest.mark.parametrize("stored", ["decoder.final.weight", "model.decoder.final.weight"])
@pytest.mark.parametrize("asked", ["decoder.final.weight", "model.decoder.final.weight"])
def test_the_models_prefix_may_be_absent_or_extra(tmp_path: Path, stored: str, asked: str) -> None:
    save_file({stored: torch.ones(2)}, tmp_path / "model.safetensors")
    source = open_source(tmp_path)
    assert source.take(asked, (2,)).tolist() == [1, 1]
    source.finish()


@pytest.mark.parametrize("stored", ["language_model.model.norm.weight", "model.language_model.norm.weight"])
def test_the_text_part_of_a_model_that_sees_is_found(tmp_path: Path, stored: str) -> None:
    vision = ["vision_tower.norm.weight", "model.vision_tower.head", "multi_modal_projector.weight"]
    save_file({name: torch.ones(2) for name in [stored, *vision]}, tmp_path / "model.safetensors")
    source = open_source(tmp_path)
    assert source.take("model.norm.weight", (2,)).tolist() == [1, 1]
    source.finish()


def test_only_what_is_known_to_see_is_left(tmp_path: Path) -> None:
    names = ["language_model.model.norm.weight", "audio_tower.weight", "language_model.vision_tower.weight"]
    save_file({name: torch.ones(2) for name in names}, tmp_path / "model.safetensors")
    source = open_source(tmp_path)
    source.take("model.norm.weight", (2,))
    with pytest.raises(
        ValueError, match=r"2 tensors that the model does not have: audio_tower\.weight, language"
    ):
        source.finish()


def test_unaligned_data_is_read(tmp_path: Path) -> None:
    values = torch.tensor([1.5, -2.5])
    header = json.dumps({"x": entry(0, 8, [2])}).encode()
    header += b" " * (1 + (-len(header) - 8) % 4)
    write_raw(tmp_path / "model.safetensors", header, values.numpy().tobytes())
    assert torch.equal(open_source(tmp_path).take("x", (2,)), values)


def test_finish_reports_what_no_one_took(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    source = open_source(tmp_path)
    source.take("model.norm.weight", (3,))
    with pytest.raises(
        ValueError, match=r"4 tensors that the model does not have: model\.brain\.weight, model"
    ):
        source.finish()


def test_finish_accepts_tensors_known_to_be_left_over(tmp_path: Path) -> None:
    left_over = ["model.layers.0.self_attn.rotary_emb.inv_freq", "lm_head.weight", "decoder.version"]
    save_file({name: torch.ones(1) for name in left_over}, tmp_path / "model.safetensors")
    open_source(tmp_path).finish()


def test_progress_counts_bytes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_file({"x": torch.zeros(1000)}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path, torch.float32, "cpu")
    source.take("x", (1000,))
    source.finish()
    assert "Loading weights: 100%" in (shown := capfd.readouterr().err)
    assert "4.00k/4.00k" in shown


def test_a_missing_or_misshapen_tensor_is_named(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    source = open_source(tmp_path)
    with pytest.raises(ValueError, match=r"tensor model\.nothing is missing; the checkpoint has 5 tensors"):
        source.take("model.nothing", (1,))
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \(3,\); must be \(4,\)"):
        source.take("model.norm.weight", (4,))
    write_raw(tmp_path / "model.safetensors", {"x": entry(0, 0, [0, 2**70])}, b"")
    with pytest.raises(ValueError, match=rf"x has shape \(0, {2**70}\); must be \(1,\)"):
        open_source(tmp_path).take("x", (1,))


def test_an_unsupported_dtype_is_named(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"x has dtype I8; must be one of F64, F32, F16, BF16"):
        open_source(tmp_path).take("x", (2,))


@pytest.mark.parametrize("cut", [1, 30])
def test_a_truncated_file_is_named_with_both_sizes(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(ValueError, match=rf"{path} is truncated: .* {size} bytes, the file has {size - cut}"):
        open_source(tmp_path)


@pytest.mark.parametrize("size", [0, 5, 8, 20])
def test_a_file_cut_inside_its_header_is_named(tmp_path: Path, size: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=rf"{path} is truncated: .*{size}"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": entry(0, 4, [1]), "b": entry(0, 4, [1])}, 4, r"b begins at .* overlaps .* must be"),
        ({"a": entry(4, 8, [1])}, 8, r"a begins at .* leaves a gap"),
        ({"a": entry(0, 4, [1])}, 8, r"has bytes that no tensor owns: .* describes \d+ bytes, the file has"),
        ({"a": entry(0, 400, [100])}, 4, r"is truncated: its header describes \d+ bytes, the file has \d+"),
        ({"a": entry(0, 8, [1])}, 8, r"a has 8 bytes; F32 of shape \(1,\) must have 4"),
        ({"a": entry(-4, 0, [1])}, 0, r"a has shape \[1\] and data_offsets \[-4, 0\]; must be integers"),
        ({"a": entry(4, 0, [1])}, 4, r"data_offsets \[4, 0\]; must be integers of at least 0, in order"),
        ({"a": entry(0, 4, ["x"])}, 4, r"a has shape \['x'\]"),  # type: ignore[list-item]
        (
            {"a": {"dtype": "F32", "shape": [1]}},
            0,
            r"header entry a is .* must have dtype, shape and data_off",
        ),
        ({"a": 7}, 0, r"header entry a is 7"),
        ({"a": {"dtype": [], "shape": [1], "data_offsets": [0, 0]}}, 4, r"has bytes that no tensor owns"),
        (b"[" * 100_000, 0, r"its header is not a JSON object"),
        (b'{"a":' + b"1" * 5000 + b"}", 0, r"its header is not a JSON object"),
        ([1], 0, r"its header is not a JSON object"),
        (b"{nonsense", 0, r"its header is not a JSON object"),
    ],
)
def test_a_corrupt_header_is_explained(tmp_path: Path, header: Any, data: int, message: str) -> None:
    write_raw(tmp_path / "model.safetensors", header, bytes(data))
    with pytest.raises(ValueError, match=message) as error:
        open_source(tmp_path)
    assert str(tmp_path / "model.safetensors") in str(error.value)


def test_an_absurd_header_length_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"<!DOCTYPE html><html></html>")
    with pytest.raises(
        ValueError, match=r"header length is \d+; must be at most 100000000: not a safetensors"
    ):
        open_source(tmp_path)


def test_a_directory_without_weights_is_named(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(
        ValueError, match=rf"{tmp_path} holds no weights: looked for model\.safetensors and mod"
    ):
        open_source(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_sharded(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"model-00002-of-00002\.safetensors is missing; model\.safetensors\.ind"
    ):
        open_source(tmp_path)


def test_a_tensor_absent_from_its_shard_is_named(tmp_path: Path) -> None:
    save_sharded(tmp_path)
    save_file({"x": torch.ones(1)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(
        ValueError, match=r"model-00001-of-00002\.safetensors: tensor model\.embed\.weight is miss"
    ):
        open_source(tmp_path)


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", 3, None, []])
def test_an_index_may_not_lead_out_of_its_directory(tmp_path: Path, shard: Any) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": shard}}))
    with pytest.raises(ValueError, match=r"weight_map names the file .* must be a plain file name"):
        open_source(tmp_path)


@pytest.mark.parametrize("text", ["{}", '{"weight_map": []}', "nonsense"])
def test_a_broken_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json"):
        open_source(tmp_path)
