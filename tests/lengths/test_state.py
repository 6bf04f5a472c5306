from __future__ import annotations

import hashlib
import random
from itertools import product

import msgspec
import pytest

from alignedserve.lengths.corpus import UNLIMITED
from alignedserve.lengths.hash_encoder import HashEncoder
from alignedserve.lengths.owners import Predictors
from alignedserve.lengths.state import CorruptState, dump, load
from tests.lengths.data import MAX_MODEL_LEN, demo_tasks, teach
from tests.lengths.test_owners import new_predictors


@pytest.fixture(scope="module")
def saved() -> tuple[Predictors, bytes]:
    predictors = new_predictors(max_entries=300)
    data = demo_tasks(500)
    teach(predictors.taught, data[:50])
    teach(predictors.of("key:a"), data[50:250])
    teach(predictors.of("group:b"), data[250:300])
    teach(predictors.of("key:a"), data[300:450], tier="be")
    teach(predictors.of("key:a"), data[450:], "length")
    predictors.fit()
    return predictors, dump(predictors)


def test_what_is_restored_predicts_the_same_and_saves_the_same(saved: tuple[Predictors, bytes]) -> None:
    predictors, data = saved
    restored = load(data, lambda: new_predictors(max_entries=300))
    assert dump(restored) == data
    for tier, owner in product(("rt", "be"), ("key:a", "group:b", "unknown")):
        for asked in demo_tasks(100, seed=1):
            before, after = (
                each.predict(asked.prompt, UNLIMITED, tier, owner) for each in (predictors, restored)
            )
            assert before == after and before.guesses == after.guesses


def test_a_smaller_memory_keeps_what_was_used_last(saved: tuple[Predictors, bytes]) -> None:
    _, data = saved
    small = load(data, lambda: new_predictors(max_entries=10))
    whole = load(data, lambda: new_predictors(max_entries=300))
    kept = [*small.of("key:a").neighbours.entries()]
    assert kept == [*whole.of("key:a").neighbours.entries()][-len(kept) :]
    assert len(kept) == len(small.of("group:b").neighbours) == 5


def test_one_that_knows_nothing_can_be_saved() -> None:
    restored = load(dump(new_predictors()), new_predictors)
    assert restored.predict([1, 2], UNLIMITED, "rt").source == "unknown"


def test_a_state_of_an_earlier_version_is_named() -> None:
    packed = msgspec.msgpack.encode([1, HashEncoder.name, b"", [], b"", b"", b"", 0, {}, []])
    with pytest.raises(CorruptState, match="it is version 1 of 'hash-256-2', not version 2 of 'hash-256-2'"):
        load(hashlib.blake2b(packed, digest_size=16).digest() + packed, new_predictors)


def test_any_damage_is_noticed(saved: tuple[Predictors, bytes]) -> None:
    _, data = saved
    rng = random.Random(0)
    for _ in range(50):
        place = rng.randrange(len(data))
        broken = data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]
        with pytest.raises(CorruptState):
            load(broken, new_predictors)
        with pytest.raises(CorruptState):
            load(data[:place], new_predictors)
    for rubbish in (b"", b"{}", b"\x00" * 100):
        with pytest.raises(CorruptState):
            load(rubbish, new_predictors)


class OtherEncoder(HashEncoder):
    name = "other"


class WiderEncoder(HashEncoder):
    dim = 512


@pytest.mark.parametrize(
    ("encoder", "message"), [(OtherEncoder(), "not version 2 of 'other'"), (WiderEncoder(), "arrays of")]
)
def test_another_encoders_vectors_are_refused(
    saved: tuple[Predictors, bytes], encoder: HashEncoder, message: str
) -> None:
    with pytest.raises(CorruptState, match=message):
        load(saved[1], lambda: Predictors(encoder, MAX_MODEL_LEN))
