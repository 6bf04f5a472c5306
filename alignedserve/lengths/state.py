"""Saves and restores the state of a predictor as bytes: a checksum, and msgpack of plain numbers.

The vectors are stored, not the index: native code reads the index's own format without checks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import msgspec
import numpy as np

from alignedserve.lengths.neighbours import STORED, Answers
from alignedserve.lengths.predictor import Predictor
from alignedserve.lengths.trust import Mean

_CHECKSUM_BYTES = 16
_VERSION = 1


class CorruptState(ValueError):
    """These bytes are no state, or the state of another predictor."""


class _State(msgspec.Struct, array_like=True):
    version: int
    encoder: str
    # The vectors one after the other, the least recently used first.
    vectors: bytes
    # (length, num_ended, cut_at) of each vector.
    answers: list[tuple[float, int, int]]
    products: bytes
    targets: bytes
    weights: bytes
    num_answers: int
    means: dict[str, tuple[float, int]]
    errors: list[tuple[tuple[int, str], tuple[float, int]]]


def dump(predictor: Predictor) -> bytes:
    entries = list(predictor.neighbours.entries())
    regression = predictor.regression
    state = _State(
        version=_VERSION,
        encoder=predictor.encoder.name,
        vectors=b"".join(stored for stored, _ in entries),
        answers=[(each.length, each.num_ended, each.cut_at) for _, each in entries],
        products=regression.products.tobytes(),
        targets=regression.targets.tobytes(),
        weights=regression.weights.tobytes(),
        num_answers=regression.num_answers,
        means={tier: (mean.value, mean.count) for tier, mean in predictor.means.items()},
        errors=[(key, (mean.value, mean.count)) for key, mean in predictor.trust.errors.items()],
    )
    packed = msgspec.msgpack.encode(state)
    return _checksum(packed) + packed


def load(data: bytes, new: Callable[[], Predictor]) -> Predictor:
    """Returns a predictor with the dumped state. Raises CorruptState."""
    packed = data[_CHECKSUM_BYTES:]
    if _checksum(packed) != data[:_CHECKSUM_BYTES]:
        raise CorruptState("its checksum is wrong")
    try:
        state = msgspec.msgpack.decode(packed, type=_State)
    except msgspec.MsgspecError as error:
        raise CorruptState(str(error)) from error
    predictor = new()
    _check(state, predictor)
    _fill(predictor, state)
    return predictor


def _check(state: _State, predictor: Predictor) -> None:
    encoder, size = predictor.encoder, len(predictor.regression.targets)
    if (state.version, state.encoder) != (_VERSION, encoder.name):
        raise CorruptState(
            f"it is version {state.version} of {state.encoder!r}, not version {_VERSION} of {encoder.name!r}"
        )
    sizes = (len(state.vectors), len(state.products), len(state.targets), len(state.weights))
    expected = (
        len(state.answers) * encoder.dim * np.dtype(STORED).itemsize,
        8 * size * size,
        8 * size,
        8 * size,
    )
    if sizes != expected:
        raise CorruptState(f"it has arrays of {sizes} bytes, not {expected}")


def _fill(predictor: Predictor, state: _State) -> None:
    regression = predictor.regression
    regression.products = np.frombuffer(state.products).reshape(regression.products.shape).copy()
    regression.targets = np.frombuffer(state.targets).copy()
    regression.num_answers = state.num_answers
    regression.weights = np.frombuffer(state.weights).copy()
    predictor.means = {tier: Mean(*mean) for tier, mean in state.means.items()}
    predictor.trust.errors = {key: Mean(*mean) for key, mean in state.errors}
    step = predictor.encoder.dim * np.dtype(STORED).itemsize
    for place, answers in enumerate(state.answers):
        predictor.neighbours.put(state.vectors[place * step : (place + 1) * step], Answers(*answers))


def _checksum(packed: bytes) -> bytes:
    return hashlib.blake2b(packed, digest_size=_CHECKSUM_BYTES).digest()
