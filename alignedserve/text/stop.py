"""Stop strings: where in a growing text the first of them ends it."""

from __future__ import annotations

from alignedserve.sampling_params import SamplingParams
from alignedserve.text.tokenizer import IncrementalDetokenizer, Tokenizer


class StopStrings:
    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self.text = ""
        self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
        self._strings = params.stop_strings
        self._min_tokens = params.min_tokens
        self._keeps_string = params.include_stop_str_in_output
        # characters in which every stop string has been looked for
        self._num_searched = 0

    def append(self, token_id: int, num_tokens: int) -> str | None:
        """The stop string that this token completed; `text` then ends there."""
        self.text += self._detokenizer.append(token_id)
        # Text held back is the text if it ends here, and a stop string ends it here.
        text = self.text + self._detokenizer.held_back()
        searched, self._num_searched = self._num_searched, max(self._num_searched, len(text))
        if len(text) <= searched or num_tokens <= self._min_tokens:
            return None
        # only a string that ends within the new text is new
        found = [(text.find(string, max(0, searched - len(string) + 1)), string) for string in self._strings]
        hits = [(position, string) for position, string in found if position >= 0]
        if not hits:
            return None
        position, string = min(hits, key=lambda hit: hit[0])
        self.text = text[: position + (len(string) if self._keeps_string else 0)]
        return string

    def flush(self) -> None:
        """Appends what is still held back. Nothing may be appended after it."""
        self.text += self._detokenizer.flush()

    @property
    def num_final(self) -> int:
        """Characters of `text` that no stop string can take away any more."""
        longest = max((_overlap(self.text, string) for string in self._strings), default=0)
        return len(self.text) - longest


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of `text` that `string` begins with."""
    lengths = range(min(len(text), len(string) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(string[:length])), 0)
