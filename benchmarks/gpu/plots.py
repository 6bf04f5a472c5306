"""The page's plots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.gpu.record import Row


def draw_all(rows: Sequence[Row], out: Path) -> None:
    """Draws the plots that have rows."""
    pictures: dict[str, tuple[list[Row], Callable[[Figure, Sequence[Row]], None]]] = {
        "step": ([row for row in rows if row["part"] == "step" and "share" in row], _step),
        "attention": ([row for row in rows if _is_mix(row)], _attention),
    }
    for name, (some, draw) in pictures.items():
        if some:
            figure = Figure(figsize=(11, 4.5), layout="constrained")
            draw(figure, some)
            figure.savefig(out / f"gpu-{name}.png", format="png", dpi=120)


def _is_mix(row: Row) -> bool:
    """Returns whether this is attention alone: {mix: lengths, kernel: name, share: of the copy's bandwidth}."""
    return row["part"] == "attention" and {"mix", "kernel", "share"} <= row.keys()


def has_mixes(rows: Sequence[Row]) -> bool:
    return any(map(_is_mix, rows))


def _step(figure: Figure, rows: Sequence[Row]) -> None:
    axes = figure.subplots()
    names = [f"{row['model']}\n{row['batch']} x {row['length']}" for row in rows]
    bars = axes.bar(names, [row["share"] * 100 for row in rows], color="tab:blue")
    axes.bar_label(bars, fmt="%.0f")
    for index, row in enumerate(rows):
        axes.hlines(row["aim"] * 100, index - 0.4, index + 0.4, color="tab:red", linestyle="--")
    axes.set(title="A decode step's share of its roofline", ylabel="%", ylim=(0, 100))


def _attention(figure: Figure, rows: Sequence[Row]) -> None:
    axes = figure.subplots()
    mixes = list(dict.fromkeys(row["mix"] for row in rows))
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    width = 0.8 / len(kernels)
    for index, kernel in enumerate(kernels):
        shares = {row["mix"]: row["share"] * 100 for row in rows if row["kernel"] == kernel}
        places = [mixes.index(mix) + index * width for mix in shares]
        axes.bar(places, list(shares.values()), width, label=kernel)
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(mixes))], mixes, rotation=20)
    axes.set(title="Decode attention: KV read, share of the copy's bandwidth", ylabel="%")
    axes.legend()
