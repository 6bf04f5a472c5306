"""A file that is cut, lies or contradicts itself is refused, with the key or tensor, before much is read."""

from __future__ import annotations

import struct
import tracemalloc
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.kernels import gguf as blocks
from alignedserve.models.fields import Fields
from alignedserve.models.file_map import TensorEntry
from alignedserve.models.gguf.config import config_of, generation_config_of
from alignedserve.models.gguf.container import TYPES, Header, read_header
from alignedserve.models.gguf.names import hf_entries
from alignedserve.models.gguf.tokenizer import has_tokenizer, tokenizer_config_of, tokenizer_of
from alignedserve.models.hf_config import model_config_from_dict

FLOAT32, STRING, ARRAY, UINT32, BOOL = 6, 8, 9, 4, 7


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def strings(values: list[str]) -> bytes:
    return struct.pack("<IQ", STRING, len(values)) + b"".join(map(text, values))


def tensor(name: str, shape: list[int], kind: int = 0, offset: int = 0) -> bytes:
    """The innermost dimension comes first."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


KEYS = [
    key("general.architecture", STRING, text("llama")),
    key("general.alignment", UINT32, struct.pack("<I", 64)),
    key("llama.attention.layer_norm_rms_epsilon", FLOAT32, struct.pack("<f", 1e-5)),
    key("tokenizer.ggml.tokens", ARRAY, strings(["a", "b", "ab"])),
    key("tokenizer.ggml.scores", ARRAY, struct.pack("<IQ3f", FLOAT32, 3, 0, 0, 1)),
    key("tokenizer.ggml.model", STRING, text("llama")),
]
TENSORS = [tensor("token_embd.weight", [32, 2], kind=8), tensor("output_norm.weight", [3], offset=128)]
DATA = bytes(68 + 60 + 12)


def header_bytes(
    keys: list[bytes] = KEYS,
    tensors: list[bytes] = TENSORS,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    num_tensors, num_keys = counts or (len(tensors), len(keys))
    head = magic + struct.pack("<IQQ", version, num_tensors, num_keys) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 64)


def refusal(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        read_header(path)
    message = str(error.value)
    assert message.startswith(str(path))
    return message.removeprefix(f"{path}: ").removeprefix(f"{path} ")


def test_keys_and_tensors_are_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(header_bytes() + DATA)
    header = read_header(path)
    assert header.metadata["general.architecture"] == "llama"
    assert header.metadata["llama.attention.layer_norm_rms_epsilon"] == 1e-5
    assert header.metadata["tokenizer.ggml.tokens"] == ["a", "b", "ab"]
    assert header.metadata["tokenizer.ggml.scores"].tolist() == [0, 0, 1]
    begin = len(header_bytes())
    found = {name: (each.dtype, each.shape, each.begin, each.end) for name, each in header.tensors.items()}
    assert found == {
        "token_embd.weight": ("Q8_0", (2, 32), begin, begin + 68),
        "output_norm.weight": ("F32", (3,), begin + 128, begin + 140),
    }


def test_types_are_those_of_the_kernels() -> None:
    in_blocks = {each.name: each for each in TYPES.values() if each.values > 1}
    assert in_blocks.keys() == blocks.TYPES.keys()
    for name, each in in_blocks.items():
        assert (each.values, each.num_bytes) == (blocks.TYPES[name].values, blocks.TYPES[name].num_bytes)


def only(*tensors: bytes) -> dict[str, Any]:
    return {"keys": KEYS, "tensors": [*tensors]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"magic": b"GGML"}, "begins with b'GGML'; must be b'GGUF': not a GGUF file"),
        ({"version": 1}, "has version 1; must be 2 or 3, little-endian"),
        ({"version": 3 << 24}, "has version 50331648, which is big-endian; must be 2 or 3"),
        ({"counts": (2, 2**60)}, "has 1152921504606846976 keys, and space for "),
        ({"counts": (2**60, len(KEYS))}, "has 1152921504606846976 tensors, and space for "),
        ({"keys": [KEYS[0], KEYS[0]]}, "has the key general.architecture twice"),
        ({"keys": [key("k", 13, b"")]}, "k has values with type 13, which does not exist"),
        (
            {"keys": [key("k", STRING, struct.pack("<Q", 2**62))]},
            "k has 4611686018427387904 bytes; must have at most",
        ),
        ({"keys": [key("k", STRING, text(b"\xff"))]}, "k is not UTF-8"),
        ({"keys": [key("a\nb", UINT32, bytes(4))]}, r"a key is 'a\nb'; must be printable"),
        ({"keys": [key("", UINT32, bytes(4))]}, "a key is ''; must be printable"),
        ({"keys": [key("k", ARRAY, struct.pack("<IQ", ARRAY, 1))]}, "k is an array of type 9; must be"),
        ({"keys": [key("k", ARRAY, struct.pack("<IQ", STRING, 2**40))]}, "k has 1099511627776 strings"),
        ({"keys": [key("k", ARRAY, struct.pack("<IQ", FLOAT32, 2**40))]}, "is truncated: k ends at byte"),
        (
            {"keys": [key("general.alignment", UINT32, struct.pack("<I", 48))]},
            "general.alignment is 48; must be",
        ),
        (
            {"keys": [key("general.alignment", STRING, text("x"))]},
            "general.alignment is 'x'; must be a power",
        ),
        (only(tensor("t", [])), "t has 0 dimensions; must have 1 to 4"),
        (only(tensor("t", [1] * 5)), "t has 5 dimensions"),
        (only(tensor("t", [4, 0])), "t has shape (0, 4), which is empty"),
        (only(tensor("t", [48, 2], kind=8)), "t has shape (2, 48); rows of Q8_0 must be whole blocks of 32"),
        (
            only(tensor("t", [256], kind=16)),
            "t has type IQ2_XXS, which is not supported; must be one of F32, F16,",
        ),
        (only(tensor("t", [256], kind=99)), "t has type 99, which is not supported"),
        (only(tensor("t", [2**40, 2**40])), "is truncated: t ends at byte"),
        (only(tensor("t", [4], offset=2**63)), "is truncated: t ends at byte"),
        (only(tensor("t", [4], offset=4)), "t has offset 4; must be a multiple of 64"),
        (only(tensor("t", [4]), tensor("t", [4], offset=64)), "has the tensor t twice"),
        (
            only(tensor("t", [17]), tensor("u", [4], offset=64)),
            "u begins at byte 512 and overlaps the tensor before",
        ),
        (only(tensor("t", [4]), tensor("u", [4])), "overlaps the tensor before it"),
        (
            only(tensor("rope_freqs.weight", [2, 2])),
            "rope_freqs.weight has type F32 and shape (2, 2); must be F32, at most 4096 in a row",
        ),
        (only(tensor("rope_factors_long.weight", [4], kind=1)), "rope_factors_long.weight has type F16"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    assert message in refusal(tmp_path / "m.gguf", header_bytes(**changes) + DATA)


@pytest.mark.parametrize("share", [0, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999])
def test_a_cut_file_is_named(tmp_path: Path, share: float) -> None:
    whole = header_bytes() + DATA
    assert "truncated" in refusal(tmp_path / "m.gguf", whole[: int(share * len(whole))])


def test_a_row_of_factors_has_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with path.open("wb") as file:
        file.write(header_bytes(KEYS, [tensor("rope_freqs.weight", [2**32])]))
        file.truncate(1 << 35)
    assert "rope_freqs.weight has type F32 and shape (4294967296,); must be F32, at most" in refusal_of(path)


def test_a_long_value_is_shortened() -> None:
    fields = Fields({"k": "x" * 100_000}, "m.gguf")
    assert len(str(fields.error("k", "short"))) < 300


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"m.gguf: can't be read: No such file"):
        read_header(tmp_path / "m.gguf")


def test_a_count_of_strings_that_the_file_could_hold_takes_little(tmp_path: Path) -> None:
    """Each of them takes eight bytes of zeros."""
    path = tmp_path / "m.gguf"
    with path.open("wb") as file:
        file.write(header_bytes([key("k", ARRAY, struct.pack("<IQ", STRING, 2**33))], []))
        file.truncate(1 << 36)
    assert "k has 8589934592 strings; must be at most" in refusal_of(path)


def refusal_of(path: Path) -> str:
    with pytest.raises(ValueError) as error:
        read_header(path)
    return str(error.value)


def read_config(header: Header) -> None:
    config, generation = config_of(header), generation_config_of(header)
    model_config_from_dict(config, generation, where=str(header.path))


def read_all(header: Header) -> None:
    with suppress(ValueError):
        read_config(header)
    if has_tokenizer(header):
        read_tokenizer(header)


def read_tokenizer(header: Header) -> None:
    tokenizer_of(header)
    tokenizer_config_of(header)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_change_of_bytes_does_anything_but_raise_value_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(header_bytes() + DATA)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(4, len(content) - 9))
        kind = data.draw(st.sampled_from(["<B", "<I", "<Q"]))
        most = 256 ** struct.calcsize(kind) - 1
        value = data.draw(st.one_of(st.integers(0, min(most, 300)), st.integers(0, most)))
        struct.pack_into(kind, content, at, value)
    path = tmp_path_factory.getbasetemp() / "changed.gguf"
    path.write_bytes(content[: data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))])
    tracemalloc.start()
    try:
        read_all(read_header(path))
    except ValueError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 4 << 20


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**31), 2**64 - 1),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.text(max_size=4), max_size=4),
    st.lists(st.integers(-2, 7), max_size=4).map(lambda each: np.array(each, dtype=np.int32)),
    st.lists(st.floats(width=32), max_size=4).map(lambda each: np.array(each, dtype=np.float32)),
)


def rope_scaling(tmp_path: Path, keys: dict[str, Any], *tensors: bytes) -> Any:
    path = tmp_path / "m.gguf"
    path.write_bytes(header_bytes(KEYS, [*TENSORS[:1], *tensors]) + DATA)
    header = read_header(path)
    header.metadata["general.architecture"] = "qwen2"
    sizes = {name: 4 for name in ARCHITECTURE_KEYS if name[:10] != "rope.scali" and name[:6] != "expert"}
    header.metadata.update({f"qwen2.{name}": value for name, value in (sizes | keys).items()})
    return config_of(header)["rope_scaling"]


@pytest.mark.parametrize(
    ("keys", "factor"),
    [
        ({}, None),
        ({"rope.scaling.factor": 1.0}, None),
        ({"rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scale_linear": 8.0}, 8.0),
        ({"rope.scaling.factor": 4.0, "rope.scale_linear": 8.0}, 4.0),
        ({"rope.scaling.type": "linear", "rope.scale_linear": 8.0}, 8.0),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scaling.factor": 4.0, "rope.scaling.finetuned": True}, 4.0),
        # as llama.cpp saves models without scaling
        ({"rope.scaling.type": "none", "rope.scaling.factor": 0.0}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}, None),
        ({"rope.scaling.factor": 0.0, "rope.scale_linear": 8.0}, 8.0),
        ({"rope.scaling.attn_factor": 1.0, "rope.scaling.yarn_log_multiplier": 0.0}, None),
    ],
)
def test_scaling_is_linear_unless_the_file_says_otherwise(
    tmp_path: Path, keys: dict[str, Any], factor: float | None
) -> None:
    wanted = {"rope_type": "linear", "factor": factor} if factor else None
    assert rope_scaling(tmp_path, keys) == wanted


@pytest.mark.parametrize(
    ("keys", "tensors", "message"),
    [
        ({"rope.scaling.alpha": 1000.0}, [], "qwen2.rope.scaling.alpha is 1000.0; must be absent"),
        ({"rope.scaling.attn_factor": 2.0}, [], "qwen2.rope.scaling.attn_factor is 2.0; must be absent"),
        ({"rope.scaling.type": "linear"}, [], "qwen2.rope.scaling.factor is missing"),
        (
            {"rope.scaling.factor": 4.0},
            [tensor("rope_freqs.weight", [2], offset=128)],
            "has 4 beside rope factors, as the scale; must be 1",
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 1.0, "rope.scaling.attn_factor": 2.0},
            [tensor("rope_freqs.weight", [2], offset=128)],
            "qwen2.rope.scaling.attn_factor is 2.0; must be 1 beside rope factors",
        ),
    ],
)
def test_scaling_that_is_not_read_is_refused(
    tmp_path: Path, keys: dict[str, Any], tensors: list[bytes], message: str
) -> None:
    with pytest.raises(ValueError) as error:
        rope_scaling(tmp_path, keys, *tensors)
    assert message in str(error.value)


def test_a_dense_model_may_say_that_it_has_no_experts(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(header_bytes(KEYS, TENSORS[:1]) + DATA)
    header = read_header(path)
    sizes = {name: 4 for name in ARCHITECTURE_KEYS if name[:10] != "rope.scali"}
    values = sizes | {"attention.sliding_window": 0, "expert_count": 0}
    header.metadata["general.architecture"] = "llama"
    header.metadata.update({f"llama.{name}": value for name, value in values.items()})
    assert config_of(header)["architectures"] == ["LlamaForCausalLM"]


def test_a_table_that_no_kernel_looks_up_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(header_bytes(KEYS, TENSORS[:1]) + DATA)
    header = read_header(path)
    name = "token_embd.weight"
    header.tensors[name] = replace(header.tensors[name], dtype="MXFP4")
    header.metadata["general.architecture"] = "qwen2"
    sizes = {key: 4 for key in ARCHITECTURE_KEYS if key[:10] != "rope.scali" and key[:6] != "expert"}
    header.metadata.update({f"qwen2.{key}": value for key, value in sizes.items()})
    with pytest.raises(ValueError, match="m.gguf: tensor token_embd.weight has type MXFP4, which can't be"):
        config_of(header)


@pytest.mark.parametrize("shape", [(8,), (2, 8), (2**31, 1, 1)])
def test_experts_are_as_many_as_the_configuration_has(shape: tuple[int, ...]) -> None:
    entry = TensorEntry("F32", shape, 0, 4)
    with pytest.raises(ValueError, match=r"ffn_up_exps.weight has shape \(.*\); must be of 4 experts"):
        list(hf_entries("Qwen3MoeForCausalLM", {"blk.0.ffn_up_exps.weight": entry}, 4))


ARCHITECTURE_KEYS = [
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"),
    *("attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon", "expert_count"),
    *("expert_used_count", "expert_feed_forward_length", "rope.freq_base", "rope.scaling.type"),
    *("rope.scaling.factor", "rope.dimension_count", "attention.sliding_window", "rope.scaling.attn_factor"),
]
TOKENIZER_KEYS = [
    *("model", "pre", "tokens", "scores", "merges", "token_type", "bos_token_id", "eos_token_id"),
    *("unknown_token_id", "padding_token_id", "add_bos_token", "add_eos_token", "add_space_prefix"),
]


@settings(max_examples=400, deadline=None)
@given(
    architecture=st.sampled_from(["llama", "qwen2", "qwen3", "qwen3moe", "gemma3", "phi3", "gpt-oss"]),
    model=st.sampled_from(["gpt2", "llama"]),
    changed=st.dictionaries(st.sampled_from(ARCHITECTURE_KEYS), VALUES, max_size=3),
    told=st.dictionaries(st.sampled_from(TOKENIZER_KEYS), VALUES, max_size=4),
)
def test_no_value_does_anything_but_raise_value_error(
    tmp_path_factory: pytest.TempPathFactory,
    architecture: str,
    model: str,
    changed: dict[str, Any],
    told: dict[str, Any],
) -> None:
    path = tmp_path_factory.getbasetemp() / "values.gguf"
    if not path.exists():
        path.write_bytes(header_bytes() + DATA)
    header = read_header(path)
    sizes = {name: 4 for name in ARCHITECTURE_KEYS if not name.startswith("rope.scaling")}
    for name, value in (sizes | changed).items():
        header.metadata[f"{architecture}.{name}"] = value
    of_tokenizer = {"model": model, "pre": "gpt-2", "merges": ["a b"]} | told
    for name, value in of_tokenizer.items():
        header.metadata[f"tokenizer.ggml.{name}"] = value
    header.metadata["general.architecture"] = architecture
    for read in read_config, read_tokenizer:
        try:
            read(header)
        except ValueError as error:
            assert str(path) in str(error)
