"""Which layers of a model share KV blocks.

Some models mix layers with full attention and layers with a sliding window. KV that sliding layers have passed is
freed, while full layers keep theirs. Layers are therefore cut into groups of equal size, each of one kind, and a block
holds the KV of one group. A request's tokens are cut into *columns* of `block_size` tokens. A column has one block in
each group, and frees those of the sliding groups when it is passed. All blocks have the same size.

Other models have one group with all layers.

A layer may have a state in place of KV, which each token changes. A column's block then holds the state after the
column's last token so far. A token reads the block with the token before it, and writes the one with its own. So to
memory, a state is KV with a window of STATE_WINDOW tokens, and a complete column's state never changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# More groups, of fewer layers each, waste less space. But a step's block table grows with the number of groups. In long
# contexts most blocks belong to full groups, so only their wasted space matters then.
MAX_GROUPS = 8


# A layer with a state reads and writes the blocks of these tokens: the one before, and its own.
STATE_WINDOW = 2


@dataclass(frozen=True, order=True)
class GroupedLayer:
    group: int
    # Index among the layers of a block.
    index: int


@dataclass(frozen=True)
class LayerGroups:
    # One entry per layer of the model. Groups with full attention come first.
    layers: tuple[GroupedLayer, ...]
    # Layers of a block. The last group of each kind may have fewer, and wastes the rest.
    num_layers: int
    # Groups with full attention, in models that also have sliding groups.
    num_full: int = 0
    # Groups with the window. In other models, the one group of all layers.
    num_sliding: int = 1
    # Latest tokens that a token attends to in sliding groups, itself included; 0: all.
    window: int = 0
    # Whether the layers with the window have a state. The window is then STATE_WINDOW.
    has_state: bool = False

    @property
    def num_groups(self) -> int:
        return self.num_full + self.num_sliding


def one_group(num_layers: int, window: int = 0, has_state: bool = False) -> LayerGroups:
    layers = tuple(GroupedLayer(0, index) for index in range(num_layers))
    return LayerGroups(layers, num_layers, window=window, has_state=has_state)


def layer_groups(windows: Sequence[int | None], num_layers: int, has_state: bool = False) -> LayerGroups:
    """Groups a model's layers. `windows`: one entry per layer, None for full attention; empty if all layers have it.
    `has_state`: those with a window have a state."""
    full = [layer for layer, window in enumerate(windows) if window is None]
    sliding = [layer for layer, window in enumerate(windows) if window is not None]
    window = max((each or 0 for each in windows), default=0)
    if not full or not sliding:
        return one_group(num_layers, window, has_state)
    size = _group_size(len(full), len(sliding))
    num_full = -(-len(full) // size)
    places = {layer: GroupedLayer(*divmod(number, size)) for number, layer in enumerate(full)}
    places |= {
        layer: GroupedLayer(num_full + number // size, number % size) for number, layer in enumerate(sliding)
    }
    layers = tuple(places[layer] for layer in range(num_layers))
    return LayerGroups(layers, size, num_full, -(-len(sliding) // size), window, has_state)


def _group_size(num_full: int, num_sliding: int) -> int:
    """Returns the number of layers per group that wastes the least space; among equals, the largest.

    If that gives too many groups, a group is larger than all layers of the rarer kind.
    """

    def num_groups(size: int) -> int:
        return -(-num_full // size) + -(-num_sliding // size)

    fewer, more = sorted((num_full, num_sliding))
    sizes = [size for size in range(fewer, 0, -1) if num_groups(size) <= MAX_GROUPS]
    sizes = sizes or [size for size in range(more, fewer, -1) if num_groups(size) <= MAX_GROUPS]
    return min(sizes, key=lambda size: num_groups(size) * size)
