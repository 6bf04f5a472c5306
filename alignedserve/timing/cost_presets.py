"""Cost models by name: the presets (cost_presets.json names their sources), or a JSON file of the user's own."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import inf
from pathlib import Path
from typing import TypeVar

import msgspec

from alignedserve.timing.cost import CostModel

_FILE = Path(__file__).with_name("cost_presets.json")
# Fields that are 0 by default, and others: a prefill may cost nothing beyond its tokens, and a copy may start at once.
_MAY_BE_ZERO = {field.name for field in msgspec.structs.fields(CostModel) if field.default == 0} | {
    "prefill_fixed_s",
    "prefill_attention_s",
    "latency_s",
    "fixed_s",
    "token_s",
}

T = TypeVar("T")


@cache
def cost_presets() -> dict[str, CostModel]:
    return {name: checked(model, name) for name, model in _read(_FILE, dict[str, CostModel]).items()}


def load_cost_model(name: str) -> CostModel:
    if name in cost_presets():
        return cost_presets()[name]
    path = Path(name)
    if not path.is_file():
        known = ", ".join(sorted(cost_presets()))
        raise ValueError(f"cost model {name!r}: must be a JSON file or one of {known}")
    return checked(_read(path, CostModel), name)


def _read(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None


def checked(model: CostModel, name: str) -> CostModel:
    """Returns the model. Raises ValueError with the field's name for a number that no device can have."""
    if not model.decode_lines:
        raise ValueError(f"{name}: decode_lines=[]: must hold at least one")
    for field, value in _numbers(msgspec.to_builtins(model)):
        last = field.rpartition(".")[2]
        if not (0 <= value < inf and (value or last in _MAY_BE_ZERO)):
            allowed = "at least 0" if last in _MAY_BE_ZERO else "above 0"
            raise ValueError(f"{name}: {field}={value}: must be {allowed}")
    return model


def _numbers(value: object, path: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _numbers(inner, f"{path}[{index}]")
    elif isinstance(value, int | float):
        yield path, value
