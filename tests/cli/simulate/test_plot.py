from __future__ import annotations

from pathlib import Path

import pytest

from alignedserve.cli.simulate.compare import Row
from alignedserve.cli.simulate.plot import draw
from tests.cli.simulate.rows import found, row

pytest.importorskip("matplotlib")


def size_of(path: Path) -> tuple[int, int]:
    """Width and height of a PNG."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


@pytest.mark.parametrize(
    ("rows", "num_panels"),
    [
        ([row("aligned", 0.9), row("fcfs", 0.5), found("bros", 0.0)], 3),
        ([row("aligned", 0.9, 500), row("fcfs", 0.5, 900)], 4),
        ([row("aligned", 0.0, 500, num_rt=0)], 1),
    ],
)
def test_there_is_a_panel_for_each_figure_that_there_is(
    tmp_path: Path, rows: list[Row], num_panels: int
) -> None:
    path = tmp_path / "plot.png"
    draw(rows, path)
    assert size_of(path)[0] == num_panels * 4 * 120


def test_where_nothing_came_of_any_nothing_is_drawn(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="plot: there is nothing to draw"):
        draw([found("aligned", 0.0)], tmp_path / "plot.png")
