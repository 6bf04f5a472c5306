"""Saves and restores the state of predictors as bytes: a checksum, and msgpack of plain numbers.

The vectors are stored, not the index: native code reads the index's own format without checks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import msgspec
import numpy as np

from alignedserve.lengths.neighbours import STORED, Answers
from alignedserve.lengths.owners import Predictors
from alignedserve.lengths.predictor import Predictor
from alignedserve.lengths.trust import Mean

_CHECKSUM_BYTES = 16
_VERSION = 2
_SUMS = np.float32
# The name of what the corpus taught. Those of owners have a colon, or are empty (gateway/http/keys.py).
_CORPUS = "corpus"


class CorruptState(ValueError):
    """These bytes are no state, or the state of another predictor."""


class _Head(msgspec.Struct, array_like=True):
    """What a state of any version begins with."""

    version: int
    encoder: str


class _Learned(msgspec.Struct, array_like=True):
    """What one owner's answers taught."""

    owner: str
    # The vectors one after the other, the least recently used first.
    vectors: bytes
    # (length, num_ended, cut_at) of each vector.
    answers: list[tuple[float, int, int]]
    # Sums over many answers, with half of their digits.
    products: bytes
    targets: bytes
    weights: bytes
    num_answers: int
    means: dict[str, tuple[float, int]]
    errors: list[tuple[tuple[int, str], tuple[float, int]]]


class _State(_Head, array_like=True):
    learned: list[_Learned]


def dump(predictors: Predictors) -> bytes:
    all_of_them = [(_CORPUS, predictors.taught), *predictors.all()]
    state = _State(
        _VERSION, predictors.taught.encoder.name, [_learned(owner, each) for owner, each in all_of_them]
    )
    packed = msgspec.msgpack.encode(state)
    return _checksum(packed) + packed


def _learned(owner: str, predictor: Predictor) -> _Learned:
    entries = list(predictor.neighbours.entries())
    regression = predictor.regression
    return _Learned(
        owner=owner,
        vectors=b"".join(stored for stored, _ in entries),
        answers=[(each.length, each.num_ended, each.cut_at) for _, each in entries],
        products=regression.products.astype(_SUMS).tobytes(),
        targets=regression.targets.astype(_SUMS).tobytes(),
        weights=regression.weights.tobytes(),
        num_answers=regression.num_answers,
        means={tier: (mean.value, mean.count) for tier, mean in predictor.means.items()},
        errors=[(key, (mean.value, mean.count)) for key, mean in predictor.trust.errors.items()],
    )


def load(data: bytes, new: Callable[[], Predictors]) -> Predictors:
    """Returns predictors with the dumped state. Raises CorruptState."""
    packed = data[_CHECKSUM_BYTES:]
    if _checksum(packed) != data[:_CHECKSUM_BYTES]:
        raise CorruptState("its checksum is wrong")
    predictors = new()
    encoder = predictors.taught.encoder
    try:
        head = msgspec.msgpack.decode(packed, type=_Head)
        if (head.version, head.encoder) != (_VERSION, encoder.name):
            raise CorruptState(
                f"it is version {head.version} of {head.encoder!r}, not version {_VERSION} of {encoder.name!r}"
            )
        state = msgspec.msgpack.decode(packed, type=_State)
    except msgspec.MsgspecError as error:
        raise CorruptState(str(error)) from error
    for learned in state.learned:
        predictor = predictors.taught if learned.owner == _CORPUS else predictors.of(learned.owner)
        _check(learned, predictor)
        _fill(predictor, learned)
    predictors.fit()
    return predictors


def _check(learned: _Learned, predictor: Predictor) -> None:
    size = len(predictor.regression.targets)
    sums, whole = np.dtype(_SUMS).itemsize, 8
    sizes = (len(learned.vectors), len(learned.products), len(learned.targets), len(learned.weights))
    expected = (
        len(learned.answers) * predictor.encoder.dim * np.dtype(STORED).itemsize,
        sums * size * size,
        sums * size,
        whole * size,
    )
    if sizes != expected:
        raise CorruptState(f"it has arrays of {sizes} bytes, not {expected}")


def _fill(predictor: Predictor, learned: _Learned) -> None:
    regression = predictor.regression
    products = np.frombuffer(learned.products, dtype=_SUMS).reshape(regression.products.shape)
    regression.products = products.astype(np.float64)
    regression.targets = np.frombuffer(learned.targets, dtype=_SUMS).astype(np.float64)
    regression.num_answers = learned.num_answers
    regression.weights = np.frombuffer(learned.weights).copy()
    predictor.means = {tier: Mean(*mean) for tier, mean in learned.means.items()}
    predictor.trust.errors = {key: Mean(*mean) for key, mean in learned.errors}
    step = predictor.encoder.dim * np.dtype(STORED).itemsize
    for place, answers in enumerate(learned.answers):
        predictor.neighbours.put(learned.vectors[place * step : (place + 1) * step], Answers(*answers))


def _checksum(packed: bytes) -> bytes:
    return hashlib.blake2b(packed, digest_size=_CHECKSUM_BYTES).digest()
