"""The model as the gateway knows it: its name, its tokenizer, its limits. No weights."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from alignedserve.config import EngineConfig
from alignedserve.engine.choices import choose_max_model_len, vocabulary_of
from alignedserve.engine.validate import Vocabulary, check_request
from alignedserve.gateway.errors import ApiError
from alignedserve.models.locate import locate_model
from alignedserve.sampling_params import SamplingParams
from alignedserve.text.tokenizer import Tokenizer
from alignedserve.types import InvalidRequest


@dataclass(frozen=True)
class ServedModel:
    name: str
    # None: token ids come and go, and there is no text
    tokenizer: Tokenizer | None
    vocabulary: Vocabulary
    max_model_len: int
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def load(cls, name: str, config: EngineConfig) -> ServedModel:
        """Raises ValueError when there is no such model."""
        found = locate_model(config.model, config.load_format, config.revision)
        directory = config.tokenizer or found.directory
        tokenizer = None
        if directory is not None and not config.skip_tokenizer_init:
            tokenizer = Tokenizer.from_directory(directory)
        return cls(name, tokenizer, vocabulary_of(found.config), choose_max_model_len(config, found.config))

    def check_name(self, asked: str | None) -> None:
        if asked is not None and asked != self.name:
            message = f"model={asked!r}: does not exist; this server has {self.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def prompt_ids(self, prompt: str | list[int]) -> list[int]:
        return self._need_tokenizer("prompt").encode(prompt) if isinstance(prompt, str) else prompt

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> list[int]:
        try:
            return self._need_tokenizer("messages").chat_ids(messages, **variables)
        except (ValueError, TypeError) as error:
            raise ApiError(400, str(error), param="messages") from error

    def check(self, prompt: list[int], params: SamplingParams) -> None:
        if len(prompt) >= self.max_model_len:
            message = (
                f"the prompt has {len(prompt)} tokens; prompt and output together may have {self.max_model_len}, "
                f"which leaves at most {self.max_model_len - 1} for the prompt"
            )
            raise ApiError(400, message, param="prompt", code="context_length_exceeded")
        check_request(prompt, params, self.vocabulary, self.max_model_len)
        if params.stop_strings:
            self._need_tokenizer("stop")

    def token_text(self, token_id: int) -> str:
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode([token_id], skip_special_tokens=False)

    def _need_tokenizer(self, name: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequest(f"{name}: text needs a tokenizer, and this model has none; give token ids")
        return self.tokenizer
