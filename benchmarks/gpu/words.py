"""A tokenizer in which every token is a word, so that all of a random model's tokens are text."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import Metaspace as MetaspaceDecoder
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Metaspace

CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def word(token: int) -> str:
    return f"t{token}"


def write_tokenizer(directory: Path, vocab_size: int) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = {f"▁{word(token)}": token for token in range(vocab_size)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=f"▁{word(0)}"))
    tokenizer.pre_tokenizer = Metaspace()
    tokenizer.decoder = MetaspaceDecoder()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory
