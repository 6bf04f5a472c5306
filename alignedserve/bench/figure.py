"""matplotlib's Figure, for all commands that draw. Only the extra alignedserve[plot] installs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure_class() -> type[Figure]:
    """Raises ValueError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("plot: needs matplotlib; pip install 'alignedserve[plot]'") from None
    return Figure
