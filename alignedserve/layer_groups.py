"""Which layers of a model share KV blocks.

Where some layers attend to all tokens and others to the latest ones, KV that the latter have passed is freed, and the
former keep theirs. So layers are cut into groups of as many, each of one kind, and a block holds the KV of one group. A
request's tokens are cut into *columns* of `block_size` tokens: a column takes a block of each group, and gives those
of the sliding groups back when it is passed. All blocks are of the same size, whichever group they are for.

Other models have one group, of all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# More groups, of fewer layers each, leave less room unused. But a step's block table is so many times as large, and in
# long contexts full groups have most of the blocks: it is room in these that counts then.
MAX_GROUPS = 8


@dataclass(frozen=True, order=True)
class GroupedLayer:
    group: int
    # Its place among the layers of a block.
    index: int


@dataclass(frozen=True)
class LayerGroups:
    # One entry per layer of the model. The groups of layers that attend to all tokens come first.
    layers: tuple[GroupedLayer, ...]
    # Of a block. The last group of a kind may have fewer, and leaves room unused.
    num_layers: int
    # How many groups attend to all tokens, where others have a window.
    num_full: int = 0
    # How many groups have the window; where there is none, it is the one group of all layers.
    num_sliding: int = 1
    # How many of the latest tokens a token attends to in sliding groups, itself included; 0: all.
    window: int = 0

    @property
    def num_groups(self) -> int:
        return self.num_full + self.num_sliding


def one_group(num_layers: int, window: int = 0) -> LayerGroups:
    return LayerGroups(
        tuple(GroupedLayer(0, index) for index in range(num_layers)), num_layers, window=window
    )


def layer_groups(windows: Sequence[int | None], num_layers: int) -> LayerGroups:
    """`windows`: of each layer, None for those that attend to all tokens; empty: all do."""
    full = [layer for layer, window in enumerate(windows) if window is None]
    sliding = [layer for layer, window in enumerate(windows) if window is not None]
    window = max((each or 0 for each in windows), default=0)
    if not full or not sliding:
        return one_group(num_layers, window)
    size = _group_size(len(full), len(sliding))
    num_full = -(-len(full) // size)
    places = {layer: GroupedLayer(*divmod(number, size)) for number, layer in enumerate(full)}
    places |= {
        layer: GroupedLayer(num_full + number // size, number % size) for number, layer in enumerate(sliding)
    }
    layers = tuple(places[layer] for layer in range(num_layers))
    return LayerGroups(layers, size, num_full, -(-len(sliding) // size), window)


def _group_size(num_full: int, num_sliding: int) -> int:
    """Returns the number of layers in a group that leaves the least room unused, the largest of these. If there would
    be too many groups, the layers of one kind may be less than a group."""

    def num_groups(size: int) -> int:
        return -(-num_full // size) + -(-num_sliding // size)

    fewer, more = sorted((num_full, num_sliding))
    sizes = [size for size in range(fewer, 0, -1) if num_groups(size) <= MAX_GROUPS]
    sizes = sizes or [size for size in range(more, fewer, -1) if num_groups(size) <= MAX_GROUPS]
    return min(sizes, key=lambda size: num_groups(size) * size)
