"""The model as the gateway sees it: its name, tokenizer, limits and adapters, without weights."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

from alignedserve.engine.choices import choose_max_model_len, vocabulary_of
from alignedserve.engine.config import EngineConfig
from alignedserve.engine.lora_modules import name_of
from alignedserve.engine.request import Vocabulary, check_ids, check_request
from alignedserve.gateway.http.errors import ApiError
from alignedserve.gateway.tools.harmony_turns import turns_of
from alignedserve.gateway.tools.reading import HARMONY_FORMAT
from alignedserve.gateway.tools.reasoning import Thinking, thinking_of
from alignedserve.models.locate import Location, locate_model
from alignedserve.sampling_params import SamplingParams
from alignedserve.text.bad_words import with_bad_word_ids
from alignedserve.text.chat_template import ChatRejected
from alignedserve.text.template_marks import harmless_chats
from alignedserve.text.tokenizer import Tokenizer
from alignedserve.types import InvalidRequest
from alignedserve.version import __version__

logger = logging.getLogger(__name__)

_SAMPLE = "A few words, as they may come: 1,234 of them  (or fewer).\n"
_NUM_SAMPLE_IDS = 1000
# How many tokens at the prompt's end are searched for an opened reasoning tag.
_END_TOKENS = 32


class _Names(Sequence[str]):
    def __init__(self, name: str, adapters: Mapping[str, str]) -> None:
        self._name = name
        self._adapters = adapters

    def __getitem__(self, index: Any) -> Any:
        return (self._name, *self._adapters)[index]

    def __len__(self) -> int:
        return 1 + len(self._adapters)


@dataclass(frozen=True)
class ServedModel:
    name: str
    # None: prompts and answers are token ids, without text.
    tokenizer: Tokenizer | None
    vocabulary: Vocabulary
    max_model_len: int
    # Whether special tokens in the messages of a chat are encoded as special tokens.
    parses_special_tokens: bool = False
    # Dimensions of an embedding. None: unknown.
    embedding_size: int | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    # The adapters (engine/lora_modules.py) by the names that clients use. They may change: see `set_adapters`.
    adapters: dict[str, str] = field(default_factory=dict)

    @cached_property
    def system_fingerprint(self) -> str:
        """Returns OpenAI's `system_fingerprint`: while it is unchanged, the same request with the same seed should get
        the same answer."""
        identity = f"{__version__} {self.name} {self.vocabulary.size} {self.max_model_len}"
        return f"fp_{hashlib.sha256(identity.encode()).hexdigest()[:10]}"

    @classmethod
    def load(cls, name: str, config: EngineConfig) -> ServedModel:
        """Returns the model, and downloads the files that are missing. Raises ValueError if there is no such model."""
        return cls.located(name, locate_model(config.model, config.load_format, config.revision), config)

    @classmethod
    def located(cls, name: str, found: Location, config: EngineConfig) -> ServedModel:
        """Returns the model at `found`, without downloading. Raises ValueError."""
        directory = config.tokenizer or found.directory
        tokenizer = None
        if directory is not None and not config.skip_tokenizer_init:
            tokenizer = Tokenizer.from_directory(directory, where=name)
        vocabulary = vocabulary_of(found.config)
        max_model_len = choose_max_model_len(config, found.config)
        size = found.config.embedding_dim or found.config.hidden_size
        return cls(
            name,
            tokenizer,
            vocabulary,
            max_model_len,
            config.allow_special_tokens_in_messages,
            size,
            adapters={module.name: module.name for module in config.adapters},
        )

    @property
    def names(self) -> Sequence[str]:
        """All model names that clients may ask for, now and later. The base model's is the first."""
        return _Names(self.name, self.adapters)

    def set_adapters(self, adapters: Mapping[str, str]) -> None:
        """Serves these adapters from now on."""
        self.adapters.clear()
        self.adapters.update(adapters)

    def check_name(self, asked: str | None) -> None:
        if asked is not None and asked not in self.names:
            message = f"model={asked!r}: does not exist; this server has {', '.join(map(repr, self.names))}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def adapter_of(self, asked: str | None) -> str:
        """Returns the adapter that a call asks for, by its valid model name. Empty: the base model."""
        return self.adapters.get(asked or "", "")

    def answering_as(self, adapter: str) -> ServedModel:
        """Returns this model under the name that the adapter's answers have. Empty: the base model."""
        return replace(self, name=name_of(adapter)) if adapter else self

    def warm_up(self) -> None:
        """Builds the detokenizer tables, which takes long for a large vocabulary."""
        if self.tokenizer:
            _ = self.tokenizer.detokenizer_tables, self._longest_token

    def try_out(self) -> None:
        """Encodes a short prompt, renders short chats and decodes some tokens, which shows at the start if that takes
        too much time or memory. Failures are ignored: a template may reject a chat, and a tokenizer may lack a token.
        Raises MemoryError."""
        if self.tokenizer is None:
            return
        self._try(lambda tokenizer: tokenizer.encode(_SAMPLE))
        self._try(lambda tokenizer: tokenizer.decode(range(min(_NUM_SAMPLE_IDS, tokenizer.vocab_size))))
        for messages, variables in islice(harmless_chats(), 2):
            self._try(lambda _, m=messages, v=variables: self.chat_ids(m, v))  # type: ignore[misc]

    def _try(self, what: Callable[[Tokenizer], object]) -> None:
        assert self.tokenizer
        try:
            what(self.tokenizer)
        except MemoryError:
            raise
        except Exception:
            logger.debug("the tokenizer was tried, and failed", exc_info=True)

    def prompt_ids(
        self,
        prompt: str | list[int],
        add_special_tokens: bool = True,
        name: str = "prompt",
        is_bounded: bool = True,
    ) -> list[int]:
        """Returns the tokens of a prompt. `name` is the parameter that holds it, for error messages. With `is_bounded`,
        a text that can't fit is refused."""
        if not isinstance(prompt, str):
            return prompt
        encode = self._need_tokenizer(name).encode
        if is_bounded:
            self._check_length(name, prompt)
        return self._encode(name, lambda: encode(prompt, add_special_tokens))

    def chat_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        add_special_tokens: bool = False,
        is_bounded: bool = True,
        is_continued: bool = False,
    ) -> list[int]:
        """Returns the tokens of a chat. The template writes its special tokens itself; `add_special_tokens` adds the
        tokenizer's. With `is_bounded`, a text that can't fit is refused. With `is_continued`, the prompt ends with the
        last message's text."""
        tokenizer = self._need_tokenizer("messages")
        parses = self.parses_special_tokens
        try:
            messages = _fitting(messages, tokenizer.chat_template(bool(variables.get("tools"))))
            # `variables` with the name of a parameter of `render_chat` raises TypeError.
            chat = tokenizer.render_chat(
                messages, parses_special_tokens=parses, continue_final_message=is_continued, **variables
            )
        except ChatRejected as error:
            raise ApiError(400, error.for_clients, param="messages") from error
        except (ValueError, TypeError) as error:
            raise ApiError(400, str(error), param="messages") from error
        if is_bounded:
            self._check_length("messages", chat.text)
        return self._encode("messages", lambda: tokenizer.rendered_ids(chat, add_special_tokens))

    def thinking_after(self, prompt: Sequence[int], has_tools: bool) -> Thinking | None:
        """Returns how reasoning is marked in the answer to this prompt. None: it has no reasoning."""
        end = self._decode("messages", prompt[-_END_TOKENS:])
        return thinking_of(self._need_tokenizer("messages").chat_template(has_tools), end)

    @property
    def has_place_for_tools(self) -> bool:
        """Whether the chat template has a place for tools."""
        return self._need_tokenizer("tools").tool_template is not None

    @property
    def tool_template(self) -> str:
        """Returns the template for chats with tools. Raises ApiError if this model has none."""
        template = self._need_tokenizer("tools").tool_template
        if template is None:
            raise ApiError(400, "tools: this model's chat template has no place for tools", param="tools")
        return template

    def writes_harmony(self, has_tools: bool) -> bool:
        """Whether the model answers chats in the harmony format (tools/harmony.py). Raises ApiError."""
        tokenizer = self._need_tokenizer("messages")
        try:
            return HARMONY_FORMAT.is_shown_by(tokenizer.chat_template(has_tools))
        except ValueError as error:
            raise ApiError(400, str(error), param="messages") from error

    def special_id(self, text: str) -> int | None:
        """Returns the id of `text` if it is a special token, which answers leave out."""
        if self.tokenizer is None:
            return None
        token_id = self.tokenizer.backend.token_to_id(text)
        return token_id if token_id in self.tokenizer.special_ids else None

    def with_bad_word_ids(self, params: SamplingParams) -> SamplingParams:
        """Returns the parameters with the tokens of `bad_words` in their place."""
        if not params.bad_words:
            return params
        try:
            return with_bad_word_ids(params, self._need_tokenizer("bad_words"))
        except ValueError as error:
            raise ApiError(400, f"bad_words: {error}", param="bad_words") from error

    def text_of(self, name: str, token_ids: Sequence[int]) -> str:
        """Returns the text of `token_ids`, which are the value of the parameter `name`."""
        check_ids(name, token_ids, self.vocabulary)
        return self._decode(name, token_ids)

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
        return self.tokenizer.detokenizer_tables.texts[token_id]

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if self.tokenizer is None else self.tokenizer.detokenizer_tables.token_bytes(token_id)

    def _encode(self, name: str, encode: Callable[[], list[int]]) -> list[int]:
        try:
            return encode()
        except ValueError as error:
            raise ApiError(400, f"{name}: {error}", param=name) from error

    def _decode(self, name: str, token_ids: Sequence[int]) -> str:
        """Raises ApiError if the tokenizer fails."""
        tokenizer = self._need_tokenizer(name)
        try:
            return tokenizer.decode(token_ids, skip_special_tokens=False)
        except ValueError as error:
            raise ApiError(400, f"{name}: {error}", param=name) from error

    def _check_length(self, name: str, text: str) -> None:
        """Refuses, before tokenising, a text that is too long even if each token is the longest one."""
        longest = self._longest_token
        if longest is not None and len(text) > self.max_model_len * longest:
            message = (
                f"{name}: {len(text)} characters; prompt and output together may have {self.max_model_len} tokens, "
                f"none longer than {longest} characters"
            )
            raise ApiError(400, message, param=name, code="context_length_exceeded")

    @cached_property
    def _longest_token(self) -> int | None:
        return None if self.tokenizer is None else self.tokenizer.max_token_chars

    def _need_tokenizer(self, name: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequest(f"{name}: text needs a tokenizer, and this model has none; give token ids")
        return self.tokenizer


def _fitting(messages: Sequence[Mapping[str, Any]], template: str) -> list[Mapping[str, Any]]:
    """Returns the messages with roles that the template has.

    Templates may lack two roles: `developer`, OpenAI's newer name of `system`, and `tool`, a call's result, which then
    becomes a user message."""
    if HARMONY_FORMAT.is_shown_by(template):
        messages = turns_of(messages)
    roles = {"developer": "system", "tool": "user"}
    unknown = {role: known for role, known in roles.items() if role not in template}
    return [m if m.get("role") not in unknown else {**m, "role": unknown[m["role"]]} for m in messages]
