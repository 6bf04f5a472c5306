"""Tiny tokenizers of the two kinds that the models have, trained on the spot."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers.models import BPE

CORPUS = [
    "the quick brown fox jumps over the lazy dog, and it's 10% off! two  spaces\n\nand lines",
    "naïve café 你好世界 日本語 🙂👩‍👩‍👧 e\u0301 Ελληνικά",
] * 20
CHATML = (
    "{%- if tools %}\n{{- '<|im_start|>system\\n# Tools\\n' }}{%- for tool in tools %}{{- tool | tojson }}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}\n"
    "{%- for message in messages %}\n"
    "{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>' + '\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n"
    "    {%- if enable_thinking is defined and enable_thinking is false %}\n"
    "        {{- '<think>\\n\\n</think>\\n\\n' }}\n    {%- endif %}\n{%- endif %}"
)
LLAMA3 = (
    "{{- bos_token }}\n"
    "{%- if messages[0].role == 'system' %}\n    {%- set system = messages[0].content | trim %}\n"
    "    {%- set messages = messages[1:] %}\n{%- else %}\n    {%- set system = '' %}\n{%- endif %}\n"
    "{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + system + '<|eot_id|>' }}\n"
    "{%- for message in messages %}\n"
    "    {%- if message.role not in ['user', 'assistant'] %}\n"
    "        {{- raise_exception('bad role ' + message.role) }}\n    {%- endif %}\n"
    "    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}\n"
    "    {{- message['content'] | trim }}\n"
    "    {{- '<|eot_id|>' }}\n"
    "    {%- if loop.index > 20 %}{% break %}{% endif %}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\n{%- endif %}\n"
)
LLAMA3_TOKENS = ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
CHATML_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@cache
def byte_level_json(special_tokens: tuple[str, ...], has_bos: bool) -> str:
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special_tokens])
    backend.add_tokens(["<think>", "</think>", "é spelled out"])
    if has_bos:
        bos = special_tokens[0]
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, backend.token_to_id(bos))]
        )
    return backend.to_str()


@cache
def byte_fallback_json() -> str:
    """As Llama 2's: spaces are ▁, and a character without a token becomes its bytes."""
    backend = Tokenizer(BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    names = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=names + [f"<0x{byte:02X}>" for byte in range(256)], show_progress=False
    )
    backend.train_from_iterator(CORPUS[:1], trainer)
    backend.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 1)])
    content = json.loads(backend.to_str())
    # the trainer makes the byte tokens special, which they are not
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in names]
    return json.dumps(content)


def write(directory: Path, tokenizer_json: str, config: dict[str, Any]) -> Path:
    (directory / "tokenizer.json").write_text(tokenizer_json)
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def write_llama3(directory: Path, **config: Any) -> Path:
    tokens = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    return write(
        directory,
        byte_level_json(tuple(LLAMA3_TOKENS), has_bos=True),
        {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": LLAMA3, **tokens, **config},
    )


def write_qwen(directory: Path, **config: Any) -> Path:
    tokens = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None}
    values = {"add_bos_token": False, "chat_template": CHATML, **tokens, **config}
    return write(
        directory,
        byte_level_json(tuple(CHATML_TOKENS), has_bos=False),
        {"tokenizer_class": "PreTrainedTokenizerFast", **values},
    )


def write_llama2(directory: Path, **config: Any) -> Path:
    flags = {
        "__type": "AddedToken",
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
    }
    tokens = {key: {"content": text, **flags} for key, text in [("bos_token", "<s>"), ("eos_token", "</s>")]}
    return write(
        directory, byte_fallback_json(), {"tokenizer_class": "PreTrainedTokenizerFast", **tokens, **config}
    )


def write_opt(directory: Path, **config: Any) -> Path:
    """As OPT's repositories: vocab.json, merges.txt, and </s> for beginning, end and unknown."""
    content = json.loads(byte_level_json(("<pad>",), has_bos=False))
    first = ["<s>", "<pad>", "</s>", "<unk>"]
    vocab = {token: index for index, token in enumerate(first)}
    vocab |= {token: index + len(first) for token, index in content["model"]["vocab"].items()}
    (directory / "vocab.json").write_text(json.dumps(vocab))
    merges = [" ".join(pair) for pair in content["model"]["merges"]]
    (directory / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    flags = {
        "__type": "AddedToken",
        "lstrip": False,
        "normalized": True,
        "rstrip": False,
        "single_word": False,
    }
    end, pad = {"content": "</s>", **flags}, {"content": "<pad>", **flags}
    values = {"bos_token": end, "eos_token": end, "unk_token": end, "pad_token": pad, "add_bos_token": True}
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "errors": "replace", **values, **config})
    )
    (directory / "config.json").write_text(json.dumps({"model_type": "opt"}))
    return directory


WRITERS = {"llama3": write_llama3, "qwen": write_qwen, "llama2": write_llama2, "opt": write_opt}
