"""Code that stands in two places.

A line counts without its comment, its indentation and the values of its literals, and only if it has a word and is no
import. Six such lines that another place has too, in the same order, are a likeness, and longer runs are one. The place
that comes first in the order of names is not counted, so four copies are three likenesses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from benchmarks.house.source import ROOT

NUM_LINES = 6
_FOLDERS = (
    *("alignedserve", "decode_worker", "kernels", "kvpool", "prefill_worker", "router"),
    *("benchmarks", "research", "tests", "docs", "deploy"),
)
_COMMENT_OR_STRING = re.compile(
    r"(#[^\n]*)"
    r"|[rbfu]{0,2}(?:\"\"\"[\s\S]*?\"\"\"|'''[\s\S]*?'''|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*')",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"\b\d[\w.]*")
_WORD = re.compile(r"[A-Za-z_]{2,}")


def python_files() -> dict[str, str]:
    """Returns the text of all Python files, by their paths from the root."""
    files = sorted(path for folder in _FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return {str(path.relative_to(ROOT)): path.read_text() for path in files}


def likenesses(files: Mapping[str, str]) -> list[str]:
    """Returns each, as "file:line lines = file:line of the first place"."""
    firsts: dict[tuple[str, ...], tuple[str, int]] = {}
    return [each for name, text in files.items() for each in _likenesses_of(name, _lines(text), firsts)]


def _likenesses_of(
    name: str, lines: list[tuple[int, str]], firsts: dict[tuple[str, ...], tuple[str, int]]
) -> Iterator[str]:
    begin = end = 0
    like = ("", 0)
    for place in range(len(lines) - NUM_LINES + 1):
        number = lines[place][0]
        first = firsts.setdefault(tuple(text for _, text in lines[place : place + NUM_LINES]), (name, number))
        # A list of similar lines is like itself one line on.
        overlaps = first[0] == name and number < first[1] + NUM_LINES
        if overlaps:
            continue
        if place > end and end:
            yield _likeness(name, lines[begin:end], like)
            end = 0
        if not end:
            begin, like = place, first
        end = place + NUM_LINES
    if end:
        yield _likeness(name, lines[begin:end], like)


def _likeness(name: str, lines: list[tuple[int, str]], first: tuple[str, int]) -> str:
    return f"{name}:{lines[0][0]} {len(lines)} = {first[0]}:{first[1]}"


def _lines(text: str) -> list[tuple[int, str]]:
    """Returns the numbers and contents of the lines that count."""
    bare = _COMMENT_OR_STRING.sub(_replacement, text)
    lines = ((number, " ".join(line.split())) for number, line in enumerate(bare.split("\n"), 1))
    return [
        (number, _NUMBER.sub("0", line))
        for number, line in lines
        if _WORD.search(line) and not line.startswith(("import ", "from "))
    ]


def _replacement(found: re.Match[str]) -> str:
    """A literal keeps its lines, so that numbers of lines stay right."""
    return "" if found[1] else "0" + "\n" * found[0].count("\n")
