"""Draws mutants from a seed, the same number from each area."""

from __future__ import annotations

from pathlib import Path

from benchmarks.mutants.areas import AREAS, files_of
from benchmarks.mutants.changes import changes, is_different
from benchmarks.mutants.edit import Edit


def draw(root: Path, num: int, seed: int) -> list[Edit]:
    """Draws at most one mutant per statement. Which ones are drawn from a function depends on that function and the
    seed. A change in another function adds or removes only a few."""
    found: list[Edit] = []
    for at, area in enumerate(AREAS):
        share = num // len(AREAS) + (at < num % len(AREAS))
        found += _of_area(root, area, share, seed)
    return found


def _of_area(root: Path, area: str, num: int, seed: int) -> list[Edit]:
    texts = {file: (root / file).read_text() for file in files_of(area, root)}
    candidates = [each for file, text in texts.items() for each in changes(file, text)]
    drawn: dict[tuple[str, int], Edit] = {}
    for edit in sorted(candidates, key=lambda each: each.rank(seed)):
        if len(drawn) == num:
            break
        place = edit.file, edit.statement_line
        if place not in drawn and is_different(texts[edit.file], edit):
            drawn[place] = edit
    return sorted(drawn.values(), key=lambda each: (each.file, each.line, each.column))
