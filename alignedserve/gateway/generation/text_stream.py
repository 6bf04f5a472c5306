"""The text of one choice, as far as it is certain after each token.

Text that may be half a character, or the start of a stop string, is held back until that is decided.
"""

from __future__ import annotations

from alignedserve.sampling_params import SamplingParams
from alignedserve.text.stop import StopStrings
from alignedserve.text.tokenizer import Tokenizer


class TextStream:
    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams) -> None:
        # The stop string that ended the choice.
        self.stop_string: str | None = None
        self._text = StopStrings(tokenizer, params) if tokenizer else None
        self._keeps_stop_token = params.include_stop_str_in_output
        self._num_tokens = 0

    def append(self, token_id: int, finish_reason: str | None) -> str:
        """Returns the text that can be sent now. `finish_reason` is set if the engine ended the choice with this
        token."""
        if self._text is None:
            return ""
        self._num_tokens += 1
        if finish_reason != "stop":
            self.stop_string = self._text.append(token_id, self._num_tokens)
        elif self._keeps_stop_token:
            # With `num_tokens=0` no stop string applies.
            self._text.append(token_id, num_tokens=0)
        if finish_reason is not None and self.stop_string is None:
            self._text.flush()
        is_over = finish_reason is not None or self.stop_string is not None
        return self._text.take_all() if is_over else self._text.take()
