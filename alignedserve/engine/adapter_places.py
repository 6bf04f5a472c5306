"""The places for adapters in a model's layers, and which adapter each holds.

All of a place's memory exists from the start. So an adapter can be written to a free place while the model runs, by
another thread: no row uses a place that has no name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from alignedserve.models.lora import AdaptedLayer, Adapter, NumberedAdapters
from alignedserve.ops.adapters import LayerAdapters
from alignedserve.ops.base import Ops
from alignedserve.types import InvalidRequest


class AdapterPlaces:
    def __init__(self, adapters: NumberedAdapters, ops: Ops, names: Sequence[str]) -> None:
        """`names`: those of the adapters that were loaded with the model, in the order of their places."""
        self._adapters = adapters
        self._ops = ops
        self._numbers = {name: number for number, name in enumerate(names, 1)}

    @property
    def can_load(self) -> bool:
        """Whether there are places for others than those that were loaded with the model."""
        return self._adapters.num_places > 0

    @property
    def numbers(self) -> Mapping[str, int]:
        """The adapters' places by their names, counted from 1."""
        return self._numbers

    def write(self, name: str, directory: Path) -> int:
        """Writes an adapter to a free place, and returns its number. `set` makes it known. One thread at a time may
        call it, beside iterations. Raises InvalidRequest; then nothing has changed that anyone uses."""
        free = set(range(1, self._adapters.num_places + 1)) - set(self._numbers.values())
        if not free:
            raise InvalidRequest(f"all {self._adapters.num_places} places for adapters are taken")
        number = min(free)
        try:
            adapter = Adapter(name, directory, self._adapters.max_rank)
            taken = [self._taken(layer, adapter) for layer in self._adapters.layers]
            adapter.finish()
        except (ValueError, OSError) as error:
            raise InvalidRequest(str(error)) from error
        for layer, one in zip(self._adapters.layers, taken, strict=True):
            self._ops.put_adapter(layer.weight, number, one)
        return number

    def set(self, name: str, number: int) -> None:
        """Lets requests use an adapter that was written. Called between two iterations."""
        self._numbers[name] = number

    def remove(self, name: str) -> None:
        """Frees an adapter's place. No request may use it any more. Called between two iterations."""
        del self._numbers[name]

    def _taken(self, layer: AdaptedLayer, adapter: Adapter) -> LayerAdapters:
        in_features = layer.in_features
        deltas = [
            adapter.take(name, out, in_features)
            for name, out in zip(layer.names, layer.out_features, strict=True)
        ]
        rank, scales = self._adapters.max_rank, [adapter.config.scale]
        one = LayerAdapters(in_features, tuple(layer.out_features), [deltas], scales, rank)
        return one if layer.split is None else one.split(layer.split)
