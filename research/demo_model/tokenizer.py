"""Builds the demo model's tokenizer: bytes, whole phrasing words, and a chat template."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from alignedserve.demo.vocabulary import END, PAD, PIECE, PIECES, SPECIAL_TOKENS

# The number of embedding rows is a multiple of this. Unused tokens fill the rest.
VOCAB_MULTIPLE = 64

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('unknown role: ' + message['role']) -}}"
    "{%- endif -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def byte_alphabet() -> list[str]:
    """Returns GPT-2's printable stand-in for each byte, in the order of the bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printable)
    stand_in = {byte: chr(byte) for byte in printable}
    stand_in.update({byte: chr(256 + place) for place, byte in enumerate(others)})
    return [stand_in[byte] for byte in range(256)]


def build_tokenizer() -> Tokenizer:
    alphabet = byte_alphabet()
    tokens = [*SPECIAL_TOKENS, *alphabet]
    tokens += ["".join(alphabet[byte] for byte in piece.encode()) for piece in PIECES]
    num_reserved = -len(tokens) % VOCAB_MULTIPLE
    reserved = [f"<|reserved_{place}|>" for place in range(num_reserved)]
    vocab = {token: place for place, token in enumerate([*tokens, *reserved])}
    # Without merges, a piece is one token or its bytes.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECE), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (*SPECIAL_TOKENS, *reserved)]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_len: int) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_len,
        "pad_token": PAD,
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
