"""Tags in text that comes bit by bit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


def overlap(text: str, start: int, tag: str) -> int:
    """Returns how many letters at the end of `text`, from `start` on, may be the beginning of `tag`."""
    longest = min(len(text) - start, len(tag) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(tag[:size])), 0)


def spelt(text: str) -> list[str]:
    """Returns the patterns of a text's letters."""
    return [re.escape(letter) for letter in text]


def beginnings(*tags: Sequence[str]) -> re.Pattern[str]:
    """Returns the pattern of what may become one of the tags if there is more text. A tag is given as the patterns of
    its parts: nothing but the end of the text may end the tag within a part."""
    return re.compile("|".join("".join(f"(?:{part}" for part in tag) + ")?" * len(tag) for tag in tags))


@dataclass(frozen=True)
class Rest:
    """How a text within a call may go on to its end."""

    # Matches it, with what ends it.
    whole: re.Pattern[str]
    # Matches what may become one, up to the end of what has come.
    begun: re.Pattern[str]


@dataclass(frozen=True)
class Tags:
    """Finds the first of some tags."""

    whole: re.Pattern[str]
    # Matches what may become one of them.
    begun: re.Pattern[str]
    # The letters that they begin with.
    first: str
    # The most characters of one.
    max_len: int

    @classmethod
    def of(cls, *tags: str) -> Tags:
        whole = re.compile("|".join(map(re.escape, tags)))
        first = "".join({tag[0] for tag in tags})
        return cls(whole, beginnings(*map(spelt, tags)), first, max(map(len, tags)))

    def held(self, text: str, start: int) -> int:
        """Returns where the end of the text may be the beginning of a tag; if nowhere, the text's length."""
        for place in range(max(start, len(text) - self.max_len), len(text)):
            if text[place] in self.first and self.begun.fullmatch(text, place):
                return place
        return len(text)
