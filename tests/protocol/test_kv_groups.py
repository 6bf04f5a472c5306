from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.kv.groups import MAX_GROUPS, GroupedLayer, layer_groups, one_group

some_windows = st.lists(st.sampled_from([None, 512, 1024]), min_size=1, max_size=100)


def gemma(num_layers: int) -> list[int | None]:
    """Every sixth layer attends to all tokens."""
    return [None if (layer + 1) % 6 == 0 else 1024 for layer in range(num_layers)]


@given(some_windows)
def test_each_layer_has_a_place_of_its_own_among_its_kind(windows: list[int | None]) -> None:
    found = layer_groups(windows, len(windows))
    assert len(found.layers) == len(set(found.layers)) == len(windows)
    is_mixed = None in windows and set(windows) != {None}
    assert (found.num_groups > 1) == is_mixed
    for layer, window in zip(found.layers, windows, strict=True):
        assert 0 <= layer.group < found.num_groups and 0 <= layer.index < found.num_layers
        assert not is_mixed or (layer.group < found.num_full) == (window is None)
    assert {layer.group for layer in found.layers} == set(range(found.num_groups))
    assert found.window == max((window or 0 for window in windows), default=0)


@given(some_windows)
def test_layers_of_a_kind_keep_their_order(windows: list[int | None]) -> None:
    found = layer_groups(windows, len(windows))
    for is_full in (True, False):
        places = [
            place for place, window in zip(found.layers, windows, strict=True) if (window is None) == is_full
        ]
        assert places == sorted(places)


@given(some_windows)
def test_no_group_is_empty_and_none_but_the_last_of_a_kind_has_room(windows: list[int | None]) -> None:
    found = layer_groups(windows, len(windows))
    lasts = {found.num_full - 1, found.num_groups - 1}
    for group in set(range(found.num_groups)) - lasts:
        assert sum(place.group == group for place in found.layers) == found.num_layers


@given(st.integers(1, 60), st.integers(1, 60))
def test_no_size_of_groups_leaves_less_room_unused(num_full: int, num_sliding: int) -> None:
    windows = num_full * [None] + num_sliding * [64]
    found = layer_groups(windows, len(windows))
    assert found.num_groups <= MAX_GROUPS
    for size in range(1, min(num_full, num_sliding) + 1):
        num_groups = -(-num_full // size) + -(-num_sliding // size)
        if num_groups <= MAX_GROUPS:
            assert found.num_groups * found.num_layers <= num_groups * size


@pytest.mark.parametrize(
    ("windows", "num_layers", "num_full", "num_sliding"),
    [
        # Gemma 3 1B, 4B, 12B and 27B: 4, 5, 8 and 10 layers attend to all.
        (gemma(26), 4, 1, 6),
        (gemma(34), 5, 1, 6),
        (gemma(48), 8, 1, 5),
        (gemma(62), 10, 1, 6),
        # gpt-oss 20B.
        ([None if layer % 2 else 128 for layer in range(24)], 12, 1, 1),
        # Ministral 8B.
        ([32_768 if layer % 4 else None for layer in range(36)], 9, 1, 3),
        # One layer that slides, as some Qwen2 may have it.
        ([*([None] * 27), 4096], 4, 7, 1),
    ],
)
def test_groups_of_models(
    windows: Sequence[int | None], num_layers: int, num_full: int, num_sliding: int
) -> None:
    found = layer_groups(windows, len(windows))
    assert (found.num_layers, found.num_full, found.num_sliding) == (num_layers, num_full, num_sliding)


@pytest.mark.parametrize(
    ("windows", "window"), [((), 0), ((None, None, None), 0), ((24, 24, 24), 24), ((24, 32, 16), 32)]
)
def test_layers_of_one_kind_are_one_group(windows: tuple[int | None, ...], window: int) -> None:
    found = layer_groups(windows, 3)
    assert found == one_group(3, window)
    assert found.layers == (GroupedLayer(0, 0), GroupedLayer(0, 1), GroupedLayer(0, 2))
    assert (found.num_groups, found.num_full, found.num_layers, found.window) == (1, 0, 3, window)
