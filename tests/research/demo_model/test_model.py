"""The committed model, as transformers runs it."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer

from alignedserve.demo import MODEL_DIR
from research.demo_model.evaluate import Answerer, held_out
from research.demo_model.tokenizer import build_tokenizer


@pytest.fixture(scope="module")
def answerer() -> Answerer:
    return Answerer(MODEL_DIR, torch.float32)


def test_it_is_small() -> None:
    assert (MODEL_DIR / "model.safetensors").stat().st_size <= 8_000_000


def test_its_tokenizer_is_the_one_that_is_built() -> None:
    saved = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    assert saved.to_str() == build_tokenizer().to_str()


@pytest.mark.slow
def test_held_out_prompts_are_answered(answerer: Answerer) -> None:
    examples = [example for some in held_out(6, seed=2).values() for example in some]
    answers = answerer.answer(examples)
    wrong = [answered for answered in answers if not answered.is_right]
    assert len(wrong) <= 2, [(answered.example.prompt[-80:], answered.text) for answered in wrong]


def test_chat_template() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    messages = [("system", "Be  kind."), ("user", "Spell {a}\n"), ("assistant", "a"), ("user", "ü")]
    templated = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in messages],
        tokenize=False,
        add_generation_prompt=True,
    )
    turns = [f"<|{role}|>{content}<|end|>" for role, content in messages]
    assert templated == "".join(turns) + "<|assistant|>"
