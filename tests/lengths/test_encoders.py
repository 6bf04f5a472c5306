from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from alignedserve.lengths.encoder import Encoder
from alignedserve.lengths.hash_encoder import MAX_HEAD, MAX_TAIL, HashEncoder
from alignedserve.lengths.predictor import make_encoder
from alignedserve.lengths.sentence_encoder import PACKAGE, SentenceEncoder
from tests.lengths.data import TOKENIZER, prompt


@pytest.fixture(scope="module")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random sentence-embedding model, with a vocabulary of letters."""
    from transformers import BertConfig, BertModel, BertTokenizer

    directory = tmp_path_factory.mktemp("bert")
    letters = "abcdefghijklmnopqrstuvwxyz0123456789?."
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    (directory / "vocab.txt").write_text("\n".join(words))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    BertModel(config).save_pretrained(directory)
    BertTokenizer(str(directory / "vocab.txt")).save_pretrained(directory)
    return directory


@pytest.fixture(params=["hash", "sentence"])
def encoder(request: pytest.FixtureRequest, tiny_bert: Path) -> Encoder:
    return make_encoder(request.param, str(tiny_bert), TOKENIZER.decode)


def test_vectors_have_the_length_one_and_are_always_the_same(encoder: Encoder) -> None:
    for text in ("", "x", "Count from 1 to 9.", "a much longer one " * 400):
        vector = encoder.encode(prompt(text))
        assert vector.shape == (encoder.dim,) and vector.dtype == np.float32
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)
        assert (vector == encoder.encode(prompt(text))).all()


def test_an_empty_prompt_is_a_prompt() -> None:
    assert HashEncoder().encode([]).tolist() == [0.0] * HashEncoder.dim


def test_the_middle_of_a_long_prompt_does_not_matter(encoder: Encoder) -> None:
    ids = prompt("one two three four five six seven eight nine ten " * 100)
    changed = list(ids)
    changed[MAX_HEAD + 10 : -MAX_TAIL - 10] = TOKENIZER.encode("else " * 50)
    assert (encoder.encode(ids) == encoder.encode(changed)).all()
    assert (encoder.encode(ids) != encoder.encode([*ids, *TOKENIZER.encode("else")])).any()


def test_a_hash_is_the_same_in_every_process_and_version() -> None:
    vector = HashEncoder().encode([1, 2, 3])
    assert np.flatnonzero(vector).tolist() == [18, 31, 32, 81, 169]


def test_what_is_alike_is_more_similar() -> None:
    first, alike, other = (
        HashEncoder().encode(prompt(text))
        for text in ("Count from 1 to 9.", "Please count from 2 to 9.", "Spell the word walrus")
    )
    assert first @ alike > HashEncoder.threshold > first @ other


def test_another_model_has_another_name(tiny_bert: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    names = {
        SentenceEncoder.load(str(tiny_bert), TOKENIZER.decode).name,
        SentenceEncoder("other", tokenizer, AutoModel.from_pretrained(tiny_bert), TOKENIZER.decode).name,
        HashEncoder.name,
    }
    assert len(names) == 3


def test_what_cannot_be_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="length_predictor='words': must be one of hash, sentence"):
        make_encoder("words")
    with pytest.raises(ValueError, match="length_predictor_model="):
        make_encoder("sentence", str(tmp_path), TOKENIZER.decode)
    with pytest.raises(ValueError, match="has no tokenizer"):
        make_encoder("sentence")


@pytest.mark.skipif(importlib.util.find_spec(PACKAGE) is None, reason=f"needs {PACKAGE}")
def test_a_real_model_knows_what_sentences_mean() -> None:
    encoder = make_encoder("sentence", None, TOKENIZER.decode)
    doctor, physician, count = (
        encoder.encode(TOKENIZER.encode(text))
        for text in ("Where can I find a doctor?", "I am looking for a physician", "Count from 1 to 9.")
    )
    assert doctor @ physician > 0.5 > doctor @ count
