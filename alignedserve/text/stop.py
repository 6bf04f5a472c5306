"""Stop strings: finds where the first of them ends a growing text.

Text is released as soon as no stop string can remove it, and released text is not searched again. A token costs the
same at the end of a long text as at its beginning.
"""

from __future__ import annotations

from functools import lru_cache

from alignedserve.sampling_params import SamplingParams
from alignedserve.text.tokenizer import IncrementalDetokenizer, Tokenizer

# Stop strings with cached `_fallbacks`: all choices of a call have the same strings.
MAX_KEPT = 256


class StopStrings:
    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
        self._strings = params.stop_strings
        self._overlaps = [_Overlap(string) for string in self._strings]
        self._min_tokens = params.min_tokens
        self._keeps_string = params.include_stop_str_in_output
        # Text that was not taken yet.
        self._text = ""
        # Leading characters of it that were searched for every stop string.
        self._num_searched = 0

    def append(self, token_id: int, num_tokens: int) -> str | None:
        """Adds a token. Returns the stop string that it completed, if any; the text then ends there."""
        new = self._detokenizer.append(token_id)
        self._text += new
        if not self._strings:
            return None
        for overlap in self._overlaps:
            overlap.append(new)
        # If the request ended here, the text would include what is held back. A stop string in that part counts.
        text = self._text + self._detokenizer.held_back()
        searched, self._num_searched = self._num_searched, max(self._num_searched, len(text))
        if len(text) <= searched or num_tokens <= self._min_tokens:
            return None
        return self._cut_at_first(text, searched)

    def _cut_at_first(self, text: str, searched: int) -> str | None:
        """Ends the text at the first stop string, and returns that. `searched`: leading characters without one."""
        # Only a match that ends within the new text can be new.
        found = [(text.find(string, max(0, searched - len(string) + 1)), string) for string in self._strings]
        hits = [(position, string) for position, string in found if position >= 0]
        if not hits:
            return None
        position, string = min(hits, key=lambda hit: hit[0])
        self._text = text[: position + (len(string) if self._keeps_string else 0)]
        return string

    def flush(self) -> None:
        """Appends the text that is still held back. Nothing may be appended after it."""
        self._text += self._detokenizer.flush()

    def take(self) -> str:
        """Returns the new text that no stop string can remove any more."""
        longest = max((overlap.size for overlap in self._overlaps), default=0)
        return self._take(len(self._text) - longest)

    def take_all(self) -> str:
        """Returns the new text, to the end."""
        return self._take(len(self._text))

    def _take(self, end: int) -> str:
        taken, self._text = self._text[:end], self._text[end:]
        self._num_searched = max(0, self._num_searched - len(taken))
        return taken


class _Overlap:
    """`size`: length of the longest suffix of a growing text that is a proper prefix of a string (Knuth, Morris and
    Pratt)."""

    def __init__(self, string: str) -> None:
        self.size = 0
        self._string = string
        self._fallbacks = _fallbacks(string)

    def append(self, text: str) -> None:
        if not self.size and self._string[0] not in text:
            return
        string, fallbacks, size = self._string, self._fallbacks, self.size
        for letter in text:
            while size and string[size] != letter:
                size = fallbacks[size - 1]
            if string[size] == letter:
                size += 1
            if size == len(string):
                size = fallbacks[size - 1]
        self.size = size


@lru_cache(maxsize=MAX_KEPT)
def _fallbacks(string: str) -> list[int]:
    """Returns, for each prefix of the string, the length of its longest proper suffix that is also a prefix."""
    found, size = [0], 0
    for letter in string[1:]:
        while size and string[size] != letter:
            size = found[size - 1]
        size += string[size] == letter
        found.append(size)
    return found
