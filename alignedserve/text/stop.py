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
        self._longest = max(map(len, self._strings))

    def append(self, token_id: int, num_tokens: int) -> str | None:
        """The stop string that this token completed; `text` then ends there."""
        new = self._detokenizer.append(token_id)
        self.text += new
        if not new or num_tokens <= self._min_tokens:
            return None
        # Only a string that ends within the new text can be new.
        start = max(0, len(self.text) - len(new) - self._longest + 1)
        found = [(self.text.find(string, start), string) for string in self._strings]
        hits = [(position, string) for position, string in found if position >= 0]
        if not hits:
            return None
        position, string = min(hits, key=lambda hit: hit[0])
        self.text = self.text[: position + (len(string) if self._keeps_string else 0)]
        return string
