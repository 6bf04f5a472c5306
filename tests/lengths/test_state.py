from __future__ import annotations

import random

import pytest

from alignedserve.lengths.corpus import UNLIMITED
from alignedserve.lengths.hash_encoder import HashEncoder
from alignedserve.lengths.predictor import Predictor
from alignedserve.lengths.state import CorruptState, dump, load
from tests.lengths.data import MAX_MODEL_LEN, demo_tasks, new_predictor, teach


@pytest.fixture(scope="module")
def saved() -> tuple[Predictor, bytes]:
    predictor = new_predictor(max_entries=300)
    data = demo_tasks(500)
    teach(predictor, data[:300])
    teach(predictor, data[300:450], tier="be")
    teach(predictor, data[450:], "length")
    return predictor, dump(predictor)


def test_what_is_restored_predicts_the_same_and_saves_the_same(saved: tuple[Predictor, bytes]) -> None:
    predictor, data = saved
    restored = load(data, lambda: new_predictor(max_entries=300))
    assert dump(restored) == data
    for tier in ("rt", "be"):
        for asked in demo_tasks(200, seed=1):
            before, after = (each.predict(asked.prompt, UNLIMITED, tier) for each in (predictor, restored))
            assert before == after and before.guesses == after.guesses


def test_a_smaller_memory_keeps_what_was_used_last(saved: tuple[Predictor, bytes]) -> None:
    _, data = saved
    small = load(data, lambda: new_predictor(max_entries=10))
    whole = load(data, lambda: new_predictor(max_entries=300))
    assert list(small.neighbours.entries()) == list(whole.neighbours.entries())[-10:]


def test_one_that_knows_nothing_can_be_saved() -> None:
    restored = load(dump(new_predictor()), new_predictor)
    assert restored.predict([1, 2], UNLIMITED, "rt").source == "unknown"


def test_any_damage_is_noticed(saved: tuple[Predictor, bytes]) -> None:
    _, data = saved
    rng = random.Random(0)
    for _ in range(50):
        place = rng.randrange(len(data))
        broken = data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]
        with pytest.raises(CorruptState):
            load(broken, new_predictor)
        with pytest.raises(CorruptState):
            load(data[:place], new_predictor)
    for rubbish in (b"", b"{}", b"\x00" * 100):
        with pytest.raises(CorruptState):
            load(rubbish, new_predictor)


class OtherEncoder(HashEncoder):
    name = "other"


class WiderEncoder(HashEncoder):
    dim = 512


@pytest.mark.parametrize(
    ("encoder", "message"), [(OtherEncoder(), "not version 1 of 'other'"), (WiderEncoder(), "arrays of")]
)
def test_another_encoders_vectors_are_refused(
    saved: tuple[Predictor, bytes], encoder: HashEncoder, message: str
) -> None:
    with pytest.raises(CorruptState, match=message):
        load(saved[1], lambda: Predictor(encoder, MAX_MODEL_LEN))
