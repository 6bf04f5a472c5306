"""What a program can find wrong with the English of the pages.

- No forbidden word: "so many" and "so much" for a number, a sentence that begins with "Of", and "who", "whose",
  "nobody" and their like.
- A page's sentences have at most MEAN words on average, and none has more than LONGEST.

Prose alone counts. Headings, tables, fenced blocks, HTML, images and comments are left out. A code span is one word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest

ROOT = Path(__file__).parents[1]
NAMED = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "examples/README.md",
]
PAGES = [ROOT / name for name in NAMED]
PAGES += sorted((ROOT / "docs").glob("**/*.md")) + sorted((ROOT / "benchmarks/results").glob("*.md"))

MEAN, LONGEST = 18, 40
# "Ready." or "no code" is no sentence: it would hide long ones in the mean
LEAST = 3

FORBIDDEN = re.compile(
    r"\bso many\b"
    r"|\bso much\b(?! (?:more|less|better|worse))"
    r"|\b(?:who|whom|whose|whoever|nobody|somebody|anybody|everybody)\b"
    r"|(?:^|(?<=[.:;] ))Of (?!course)",
    re.IGNORECASE,
)
FENCE = re.compile(r"^(```|~~~).*?^\1[^\n]*$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
ITEM = re.compile(r"(?:[-*+]|\d+\.) ")
SPAN = re.compile(r"`[^`]*`")
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
END = re.compile(r"(?<=[.!?])[\"”*)]*\s+(?=[A-Z0-9\"*(`]|code)")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def sentences(text: str) -> Iterator[str]:
    """The sentences of a Markdown page's prose. Each item of a list begins one."""
    lines = []
    for line in COMMENT.sub("", FENCE.sub("\n\n", text)).splitlines():
        stripped = line.strip()
        if stripped.startswith(("|", "#", "<", "!")) or line.startswith("    "):
            lines.append("")
        elif item := ITEM.match(stripped):
            lines += ["", stripped[item.end() :]]
        else:
            lines.append(stripped)
    for paragraph in re.split(r"\n\s*\n", "\n".join(lines)):
        plain = LINK.sub(r"\1", SPAN.sub("code", " ".join(paragraph.split())))
        yield from filter(None, END.split(plain))


def forbidden_words(text: str) -> list[str]:
    """Each forbidden word, with its sentence."""
    return [f"{found[0]!r} in: {each}" for each in sentences(text) for found in FORBIDDEN.finditer(each)]


def too_long(text: str) -> list[str]:
    """What is wrong with the lengths of the sentences; empty if nothing is."""
    counted = [(len(each.split()), each) for each in sentences(text)]
    wrong = [f"{length} words: {each}" for length, each in counted if length > LONGEST]
    mean = fmean([length for length, _ in counted if length >= LEAST] or [0])
    return wrong + ([f"{mean:.1f} words a sentence on average"] if mean > MEAN else [])


@each_page
def test_no_word_is_forbidden(page: Path) -> None:
    assert not forbidden_words(page.read_text())


@each_page
def test_sentences_are_short(page: Path) -> None:
    assert not too_long(page.read_text())


# ---- the finder itself ----


@pytest.mark.parametrize(
    "sentence",
    [
        "It waits so many seconds.",
        "Redis takes so much of it.",
        "Blocks whose KV is passed are free.",
        "Nobody reads it.",
        "It runs. Of these, one is late.",
        "- Of all requests, ten are late.",
        "The rest: of ten requests, one is late.",
    ],
)
def test_forbidden_words_are_found(sentence: str) -> None:
    assert len(forbidden_words(f"It starts here.\n\n{sentence}\n")) == 1


@pytest.mark.parametrize(
    "text",
    [
        "It is so much better, and of course it is free. Of course it is.",
        "# Who\n\nIt runs.",
        "| who | what |\n| --- | --- |\n| nobody | so many |",
        "```sh\nwhoami # nobody\n```",
        "~~~\nnobody\n~~~",
        "<!-- nobody\nreads it -->It runs.",
        "The log has `nobody is there`.",
        "It runs:\n\n    nobody\n",
        "See [the page](nobody.md).",
    ],
)
def test_other_words_and_other_text_are_not(text: str) -> None:
    assert not forbidden_words(text)


def test_a_sentence_ends_where_the_next_begins() -> None:
    prose = "It has 2.5 GB, e.g. here.\nThe *next (one).* `serve` runs! Why?"
    assert list(sentences(f"# Title\n\n{prose}\n\n- [first](a.md) thing\n- second\n  half\n")) == [
        "It has 2.5 GB, e.g. here.",
        "The *next (one).",
        "code runs!",
        "Why?",
        "first thing",
        "second half",
    ]


def test_long_sentences_are_found() -> None:
    just, over = " ".join(["word"] * LONGEST) + ".", " ".join(["word"] * (LONGEST + 1)) + "."
    short = "It runs here.\n\n" * 5
    assert not too_long(short + just)
    assert too_long(short + over) == [f"{LONGEST + 1} words: {over}"]


def test_long_means_are_found() -> None:
    just, over = " ".join(["word"] * MEAN) + ".", " ".join(["word"] * (MEAN + 2)) + "."
    assert not too_long(f"{just}\n\nOnce {just[5:]}")
    # what is no sentence does not hide it
    assert too_long(f"{just}\n\nReady.\n\n{over}") == [f"{MEAN + 1:.1f} words a sentence on average"]


def test_a_page_without_prose_is_short() -> None:
    assert not too_long("# Title\n\n| a | b |\n| --- | --- |\n")
