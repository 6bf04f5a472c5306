"""Text to token ids and back. Results equal those of transformers' tokenizer for the same directory."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from alignedserve.text.chat_template import ChatTemplates, Message
from alignedserve.text.control_tokens import LONG_TEXT, ControlTokens
from alignedserve.text.detokenizer import DetokenizerTables, IncrementalDetokenizer
from alignedserve.text.panics import decoded, panics_are_errors
from alignedserve.text.tokenizer_files import TokenizerFiles, read_tokenizer_files

__all__ = ["IncrementalDetokenizer", "Tokenizer"]


# The most characters that a normalizer can combine into one: up to four for NFC.
_SHRINKS_BY = {"none": 1, "NFC": 4}


@dataclass(frozen=True)
class RenderedChat:
    text: str
    # The text with the template's own control tokens marked. None: all control tokens in the text count.
    marked: str | None = None


def _with_end(message: Message, end: str) -> dict[str, Any]:
    """Returns the message with `end` after its text. Raises ValueError."""
    match message.get("content"):
        case str(text):
            return {**message, "content": text + end}
        case [*parts, {"type": "text", "text": str(text)} as last]:
            return {**message, "content": [*parts, {**last, "text": text + end}]}
    raise ValueError("messages: the last one has no text that could be continued")


def _up_to(end: str | None, text: str) -> str:
    """Returns the text before `end`. Raises ValueError if it occurs more than once, or not at all."""
    if end is None:
        return text
    if text.count(end) != 1:
        raise ValueError("messages: this model's chat template can't continue the last one")
    return text.partition(end)[0]


class Tokenizer:
    def __init__(self, files: TokenizerFiles, where: str = "tokenizer") -> None:
        self.files = files
        self.backend = files.backend
        self.has_chat_template = bool(files.chat_templates)
        self._special_tokens = files.special_tokens
        self._chat_templates = ChatTemplates(files.chat_templates, files.special_tokens, where)

    @classmethod
    def from_directory(cls, directory: Path | str, where: str | None = None) -> Tokenizer:
        """Reads the tokenizer. Raises ValueError with the directory and the expected files if there is none. `where`
        names it in later errors; by default the directory does."""
        return cls(read_tokenizer_files(Path(directory).expanduser()), where or str(directory))

    @cached_property
    def tool_template(self) -> str | None:
        """The chat template for chats with tools; None if it would ignore them."""
        return self._chat_templates.with_tools

    def chat_template(self, has_tools: bool) -> str:
        """Returns the template that renders chats. Raises ValueError if there is none."""
        return self._chat_templates.source(has_tools)

    @cached_property
    def eos_token_id(self) -> int | None:
        return self._special_id("eos_token")

    @cached_property
    def vocab_size(self) -> int:
        """The highest id plus one. The model's own vocabulary may be padded to a larger size."""
        return 1 + max(self.backend.get_vocab(with_added_tokens=True).values())

    @cached_property
    def max_token_chars(self) -> int | None:
        """The most characters of a text that one token can stand for; None if there is no known limit."""
        spec = json.loads(self.backend.to_str())
        normalizer = (spec["normalizer"] or {"type": "none"})["type"]
        is_bytewise = (spec["decoder"] or {}).get("type") == "ByteLevel" and spec["model"]["type"] == "BPE"
        drops = "Removed" in json.dumps(spec["pre_tokenizer"]) or any(
            token["lstrip"] or token["rstrip"] for token in spec["added_tokens"]
        )
        if not is_bytewise or drops or normalizer not in _SHRINKS_BY:
            # An unknown token may stand for a whole word, and others for all the space around them.
            return None
        # In these vocabularies one letter stands for one byte.
        longest = max(map(len, self.backend.get_vocab(with_added_tokens=True)))
        return longest * _SHRINKS_BY[normalizer]

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` omits when it skips special tokens."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def detokenizer_tables(self) -> DetokenizerTables:
        return DetokenizerTables(self.backend)

    @cached_property
    def control_tokens(self) -> ControlTokens:
        return ControlTokens(self.backend)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encodes the text. Special tokens in it become tokens. For a long text, other threads can run in the
        meantime."""
        try:
            with panics_are_errors():
                if len(text) < LONG_TEXT:
                    return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
                # Unlike `encode`, this releases the interpreter's lock.
                return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError as error:
            raise ValueError("text: must be a string without lone surrogates") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decodes the ids. Ids outside the vocabulary decode to nothing."""
        return decoded(self.backend, ids, skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Renders the chat as text. `variables` are the template's own, such as Qwen3's enable_thinking. Raises
        ValueError if there is no template, or if it rejects the messages."""
        return self._chat_templates.render(
            messages, tools, add_generation_prompt=add_generation_prompt, **variables
        )

    def render_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        parses_special_tokens: bool = False,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> RenderedChat:
        """Renders the chat. With `parses_special_tokens`, special tokens in messages, tools and variables become
        tokens, too. With `continue_final_message`, the prompt ends with the last message's text. Raises the errors of
        apply_chat_template, and ValueError if the template can't do that."""
        variables["add_generation_prompt"] = add_generation_prompt and not continue_final_message
        # No text contains it, so it shows where the last message ends.
        end = f"x{secrets.token_hex(16)}" if continue_final_message else None
        if end is not None:
            messages = [*messages[:-1], _with_end(messages[-1], end)]
        if parses_special_tokens or not self.control_tokens.ids:
            return RenderedChat(_up_to(end, self._chat_templates.render(messages, tools, **variables)))
        marked = self._chat_templates.render_marked(self.control_tokens, messages, tools, **variables)
        marked = _up_to(end, marked)
        return RenderedChat(self.control_tokens.unmarked(marked), marked)

    def rendered_ids(self, chat: RenderedChat, add_special_tokens: bool = False) -> list[int]:
        """Encodes the chat. The template writes its special tokens itself; `add_special_tokens` adds the
        tokenizer's."""
        ids = self.encode(chat.text, add_special_tokens=False)
        if chat.marked is None or self.control_tokens.are_all_marked(chat.marked, ids):
            return self.encode(chat.text) if add_special_tokens else ids
        with panics_are_errors():
            return self.control_tokens.encode(chat.marked, add_special_tokens)

    def chat_ids(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        parses_special_tokens: bool = False,
        add_special_tokens: bool = False,
        **variables: Any,
    ) -> list[int]:
        """Renders and encodes a chat: `render_chat`, then `rendered_ids`."""
        chat = self.render_chat(
            messages,
            add_generation_prompt,
            tools,
            parses_special_tokens=parses_special_tokens,
            **variables,
        )
        return self.rendered_ids(chat, add_special_tokens)

    def _special_id(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)
