"""Decodes a growing list of token ids piece by piece. The joined pieces equal the decoding of the whole list.

Tokens do not end at character boundaries. Two kinds of tokenizer split characters over tokens:

- byte-level (GPT-2, OPT, Llama 3, Qwen): a token is bytes, and the text is their UTF-8. An incremental UTF-8 decoder is
  exact, at the price of a table from ids to bytes.
- byte fallback (Llama 2, Mistral): some tokens are single bytes. A run of them is decoded together: as UTF-8 if all of
  it is valid, else each byte as U+FFFD. A run's text is therefore known only when the run ends.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import Protocol

import tokenizers
from tokenizers import pre_tokenizers

from alignedserve.text.panics import decoded

BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
REPLACEMENT = "\ufffd"
# If this many pending tokens still seem to end within a character, they do not begin one.
MAX_PENDING = 64
# The text of a longer run of byte tokens is not decoded again for each token.
SHORT_RUN = 16


class Pieces(Protocol):
    def append(self, token_id: int) -> str: ...

    def held_back(self) -> str: ...

    def flush(self) -> str: ...


class TokenTables(Protocol):
    """The methods of a Tokenizer that are used here."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    @property
    def detokenizer_tables(self) -> DetokenizerTables: ...


class IncrementalDetokenizer:
    def __init__(self, tokenizer: TokenTables, skip_special_tokens: bool = True) -> None:
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._pieces = tokenizer.detokenizer_tables.new_pieces()

    def append(self, token_id: int) -> str:
        """Adds a token and returns the text that it completes. Returns an empty text inside a character."""
        return "" if token_id in self._skipped else self._pieces.append(token_id)

    def held_back(self) -> str:
        """Returns what `flush` would return, without a possible incomplete character. Changes nothing."""
        return self._pieces.held_back()

    def flush(self) -> str:
        """Returns the text that is still held back. Nothing may be appended after it."""
        return self._pieces.flush()


class DetokenizerTables:
    """Tables shared by the detokenizers of one tokenizer. They are filled as tokens occur."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        decoder = json.loads(backend.to_str())["decoder"] or {}
        kinds = {part["type"] for part in [decoder, *decoder.get("decoders", [])] if part}
        self.is_byte_level = decoder.get("type") == "ByteLevel"
        # Byte-level decoding is one of several steps here. Only the text shows whether a character is complete.
        self.may_end_inside_character = not self.is_byte_level and "ByteLevel" in kinds
        self.backend = backend
        self.bytes_of = _TokenBytes(backend)
        self.texts = _TokenTexts(backend)
        self.is_byte = _IsByteToken(backend, has_fallback="ByteFallback" in kinds)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the UTF-8 bytes that the token adds to the text, which may be a part of a character."""
        if self.is_byte_level:
            return self.bytes_of[token_id]
        token = self.backend.id_to_token(token_id)
        if token is not None and self.is_byte[token_id]:
            return bytes.fromhex(token[3:5])
        return self.texts[token_id].encode()

    def new_pieces(self) -> Pieces:
        return _BytePieces(self.bytes_of) if self.is_byte_level else _WindowPieces(self)


class _BytePieces:
    def __init__(self, bytes_of: _TokenBytes) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def append(self, token_id: int) -> str:
        return self._decoder.decode(self._bytes_of[token_id])

    def held_back(self) -> str:
        return ""

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class _WindowPieces:
    """Decodes the pending tokens together with the last token before them, and cuts off the text of that token.

    The token before matters: decoders treat the first token of a list specially and strip its space.
    """

    def __init__(self, tables: DetokenizerTables) -> None:
        self._tables = tables
        self._context: list[int] = []
        self._pending: list[int] = []
        self._run = _ByteRun()

    def append(self, token_id: int) -> str:
        is_byte = self._tables.is_byte[token_id]
        if is_byte is None:
            # The token decodes to nothing, so it must not become the context.
            return ""
        self._pending.append(token_id)
        if is_byte:
            self._run.append(self._tables.token_bytes(token_id))
            return ""
        return self._hand_out(is_last=False)

    def held_back(self) -> str:
        if len(self._pending) > SHORT_RUN and self._run.num_bytes == len(self._pending):
            return self._run.text
        return self._decode().rstrip(REPLACEMENT) if self._pending else ""

    def flush(self) -> str:
        return self._hand_out(is_last=True) if self._pending else ""

    def _hand_out(self, is_last: bool) -> str:
        text = self._decode()
        may_go_on = self._tables.may_end_inside_character and len(self._pending) < MAX_PENDING
        if may_go_on and text.endswith(REPLACEMENT) and not is_last:
            return ""
        self._context, self._pending = self._pending[-1:], []
        self._run = _ByteRun()
        return text

    def _decode(self) -> str:
        text = decoded(self._tables.backend, self._context + self._pending, skip_special_tokens=False)
        known = len(self._tables.texts[self._context[0]]) if self._context else 0
        return text[known:]


class _ByteRun:
    """The text of consecutive byte tokens."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._text = ""
        self._decoder: codecs.IncrementalDecoder | None = codecs.getincrementaldecoder("utf-8")()

    def append(self, byte: bytes) -> None:
        self.num_bytes += 1
        if self._decoder is None:
            return
        try:
            self._text += self._decoder.decode(byte)
        except UnicodeDecodeError:
            self._decoder = None

    @property
    def text(self) -> str:
        """Returns the text; empty while it ends within a character, or if it is no valid UTF-8."""
        is_whole = self._decoder is not None and not self._decoder.getstate()[0]
        return self._text if is_whole else ""


class _TokenBytes(dict[int, bytes]):
    """The bytes of each token in a byte-level vocabulary, which spells bytes in an alphabet of 256 printable
    characters."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        # Printable bytes are spelled as themselves, the others in order by characters above 255.
        self._byte_of = {char: ord(char) for char in alphabet if ord(char) < 256}
        others = [byte for byte in range(256) if byte not in self._byte_of.values()]
        self._byte_of |= dict(zip((char for char in alphabet if ord(char) > 255), others, strict=True))

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) or ""
        if all(char in self._byte_of for char in token):
            value = bytes(self._byte_of[char] for char in token)
        else:
            # An added token, which is spelled as plain text.
            value = token.encode()
        self[token_id] = value
        return value


class _TokenTexts(dict[int, str]):
    """The text of each token when it is decoded alone."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend

    def __missing__(self, token_id: int) -> str:
        self[token_id] = decoded(self._backend, [token_id], skip_special_tokens=False)
        return self[token_id]


class _IsByteToken(dict[int, bool | None]):
    """Whether an id is a byte token; None for an id that is not in the vocabulary."""

    def __init__(self, backend: tokenizers.Tokenizer, has_fallback: bool) -> None:
        self._backend = backend
        self._has_fallback = has_fallback

    def __missing__(self, token_id: int) -> bool | None:
        token = self._backend.id_to_token(token_id)
        is_byte = self._has_fallback and token is not None and BYTE_TOKEN.fullmatch(token) is not None
        self[token_id] = None if token is None else is_byte
        return self[token_id]
