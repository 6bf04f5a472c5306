import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.demo.tasks import TASKS
from alignedserve.demo.vocabulary import PIECES, SPECIAL_TOKENS, num_tokens
from research.demo_model.tokenizer import build_tokenizer

TOKENIZER = build_tokenizer()


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


@given(st.text().filter(lambda text: "<|" not in text))
def test_the_plain_count_agrees(text: str) -> None:
    assert num_tokens(text) == len(TOKENIZER.encode(text).ids)


@pytest.mark.parametrize("name", TASKS)
def test_the_plain_count_agrees_on_tasks(name: str) -> None:
    rng = random.Random(3)
    for _ in range(20):
        example = TASKS[name].generate(rng)
        for text in (example.prompt, example.answer):
            assert num_tokens(text) == len(TOKENIZER.encode(text).ids)


def test_letters_and_digits_stay_single() -> None:
    assert TOKENIZER.encode("stone 4071").tokens == [*"stone", "Ġ", *"4071"]


def test_phrasing_words_are_whole() -> None:
    assert TOKENIZER.encode("Count from 1 to 5, please").tokens[:4] == ["Count", "Ġfrom", "Ġ", "1"]
    for task in TASKS.values():
        for phrasing in task.phrasings:
            # what an argument touches is not a word of the phrasing
            literal = re.sub(r" ?\{\w+\}", "0", phrasing)
            for word in re.findall(r" ?[A-Za-z]{2,}", literal):
                assert word in PIECES, (phrasing, word)


def test_special_tokens_come_first() -> None:
    assert [TOKENIZER.id_to_token(place) for place in range(5)] == list(SPECIAL_TOKENS)
    assert TOKENIZER.get_vocab_size() == 384
