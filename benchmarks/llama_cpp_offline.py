"""llama.cpp's side of cpu_vs_llama_cpp.py, run with its Python: `convert MODEL --to OUT`, or `rate GGUF`. The latter
appends one JSON line to a file."""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

# llama.cpp's formats and its numbers for them.
FORMATS = {"bf16": 32, "q8_0": 7, "q4_0": 2}
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OTHERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def convert(model: Path, out: Path) -> None:
    """Writes the bfloat16 Llama in a Hugging Face directory in all formats: OUT-bf16.gguf etc."""
    config = json.loads((model / "config.json").read_text())
    whole = Path(f"{out}-bf16.gguf")
    writer = gguf.GGUFWriter(whole, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(FORMATS["bf16"])
    for name, bits in tensors(model / "model.safetensors"):
        target = new_name(name)
        for part, heads in (("attn_q", "num_attention_heads"), ("attn_k", "num_key_value_heads")):
            if part in target:
                bits = rotated(bits, config[heads])
        if bits.ndim == 1:
            writer.add_tensor(target, (bits.astype(np.uint32) << 16).view(np.float32))
        else:
            writer.add_tensor(target, bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for name, number in FORMATS.items():
        if name != "bf16":
            params = llama_cpp.llama_model_quantize_default_params()
            params.ftype = number
            target_file = f"{out}-{name}.gguf".encode()
            assert llama_cpp.llama_model_quantize(str(whole).encode(), target_file, ctypes.byref(params)) == 0


def tensors(path: Path) -> list[tuple[str, Any]]:
    """Returns the tensors' bits as uint16."""
    with path.open("rb") as file:
        num_header = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(num_header))
    data = np.memmap(path, np.uint8, "r", 8 + num_header)
    return [
        (name, data[slice(*each["data_offsets"])].view(np.uint16).reshape(each["shape"]))
        for name, each in header.items()
        if name != "__metadata__"
    ]


def new_name(name: str) -> str:
    name = name.removesuffix(".weight")
    if name in OTHERS:
        return f"{OTHERS[name]}.weight"
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.weight"


def rotated(bits: Any, num_heads: int) -> Any:
    """Reorders rows: llama.cpp rotates neighbours, and Hugging Face rotates halves of a head."""
    halves = bits.reshape(num_heads, 2, bits.shape[0] // num_heads // 2, bits.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(bits.shape))


def rate(path: str, prompt: list[int], num_tokens: int, num_threads: int, out: str) -> None:
    """Writes the tokens per second of one stream, without the time to first token, and the tokens."""
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch = 1024, num_threads, num_threads
    context = llama_cpp.llama_init_from_model(model, params)
    num_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def next_token(tokens: list[int]) -> int:
        # Keeps the array alive: the batch only points to it.
        ids = (llama_cpp.llama_token * len(tokens))(*tokens)
        batch = llama_cpp.llama_batch_get_one(ids, len(tokens))
        assert llama_cpp.llama_decode(context, batch) == 0
        logits = llama_cpp.llama_get_logits_ith(context, -1)
        return int(np.ctypeslib.as_array(logits, (num_vocab,)).argmax())

    said = [next_token(prompt)]
    begun_s = time.perf_counter()
    for _ in range(num_tokens):
        said.append(next_token(said[-1:]))
    tokens_per_s = num_tokens / (time.perf_counter() - begun_s)
    with open(out, "a") as file:
        print(json.dumps({"tokens_per_s": tokens_per_s, "tokens": said}), file=file)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("convert", "rate"))
    parser.add_argument("path")
    parser.add_argument("--to", type=Path)
    parser.add_argument("--prompt", default="")
    parser.add_argument("--num-tokens", type=int, default=64)
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--out")
    options = parser.parse_args()
    if options.what == "convert":
        convert(Path(options.path), options.to)
    else:
        prompt = [int(each) for each in options.prompt.split(",")]
        rate(options.path, prompt, options.num_tokens, options.num_threads, options.out)


if __name__ == "__main__":
    main()
