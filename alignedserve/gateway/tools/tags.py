"""Finds tags in text that arrives in pieces."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


def overlap(text: str, start: int, tag: str) -> int:
    """Returns the number of characters at the end of `text`, after `start`, that may be the start of `tag`."""
    longest = min(len(text) - start, len(tag) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(tag[:size])), 0)


def spelt(text: str) -> list[str]:
    """Returns a pattern for each character of the text."""
    return [re.escape(letter) for letter in text]


def beginnings(*tags: Sequence[str]) -> re.Pattern[str]:
    """Returns the pattern of texts that may become one of the tags. A tag is given as the patterns of its parts. Only
    the end of the text may cut a tag within a part."""
    return re.compile("|".join("".join(f"(?:{part}" for part in tag) + ")?" * len(tag) for tag in tags))


@dataclass(frozen=True)
class Rest:
    """How a string within a call may continue to its end."""

    # Matches the rest and what ends it.
    whole: re.Pattern[str]
    # Matches a part of the rest, up to the end of the received text.
    begun: re.Pattern[str]


@dataclass(frozen=True)
class Tags:
    """Finds the first of several tags."""

    whole: re.Pattern[str]
    # Matches text that may become one of them.
    begun: re.Pattern[str]
    # Their first characters.
    first: str
    # Length of the longest one.
    max_len: int

    @classmethod
    def of(cls, *tags: str) -> Tags:
        whole = re.compile("|".join(map(re.escape, tags)))
        first = "".join({tag[0] for tag in tags})
        return cls(whole, beginnings(*map(spelt, tags)), first, max(map(len, tags)))

    def held(self, text: str, start: int) -> int:
        """Returns where a tag may begin at the end of the text. Otherwise, the text's length."""
        for place in range(max(start, len(text) - self.max_len), len(text)):
            if text[place] in self.first and self.begun.fullmatch(text, place):
                return place
        return len(text)
