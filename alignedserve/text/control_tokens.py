"""Tokens that mark the turns of a chat. In a chat's text, only the template's own become such tokens.

Text alone does not tell a template's `<|im_end|>` from one that a client wrote. The template's own are therefore
marked: each is followed by a secret of this process. A second tokenizer knows the marked ones, and treats unmarked ones
as ordinary characters. It otherwise behaves like the first: it is the same library with the same settings.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from functools import cached_property

import tokenizers
from tokenizers import AddedToken, Encoding

# Texts of at least this many characters are encoded in a way that lets other threads run.
LONG_TEXT = 2000
# Some vocabularies (DeepSeek's) do not declare these tokens as special, but they look like those of other models.
_BARRED = re.compile(r"<[|\uff5c].*[|\uff5c]>", re.DOTALL)


class ControlTokens:
    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        unknown = _unknown_token(backend)
        added = backend.get_added_tokens_decoder()
        # The ids of the control tokens by their text.
        self.ids = {
            token.content: token_id
            for token_id, token in added.items()
            if (token.special or _BARRED.fullmatch(token.content)) and token.content != unknown
        }
        # No one outside this process can know it.
        self._mark = secrets.token_hex(16)
        self._any = re.compile(_one_of(list(self.ids)) or "(?!)")

    def marked(self, text: str) -> str:
        """Marks all control tokens in the text; those that are marked already stay so."""
        return self._any.sub(lambda found: found[0] + self._mark, self.unmarked(text))

    def unmarked(self, text: str) -> str:
        return text.replace(self._mark, "")

    def mark_also(self, text: str, those: frozenset[str]) -> str:
        """Marks those of `those` that are not marked yet."""

        def mark(found: re.Match[str]) -> str:
            is_meant = found[0] in those and not text.startswith(self._mark, found.end())
            return found[0] + self._mark * is_meant

        return self._any.sub(mark, text)

    def in_text(self, text: str, is_marked: bool) -> Iterator[str]:
        """Yields the control tokens in the text that are marked, or that are not."""
        for found in self._any.finditer(text):
            if text.startswith(self._mark, found.end()) == is_marked:
                yield found[0]

    def are_all_marked(self, marked: str, ids: list[int]) -> bool:
        """Returns whether all control tokens among `ids`, which encode the unmarked text, are marked in `marked`."""
        expected = [self.ids[token] for token in self.in_text(marked, is_marked=True)]
        return expected == [token_id for token_id in ids if token_id in self._all_ids]

    def encode(self, marked: str, add_special_tokens: bool) -> list[int]:
        """Encodes the text. Only marked control tokens become control tokens."""
        found = Encoding.merge(list(self._encodings(marked)))
        whole = self._guarded.post_process(found, add_special_tokens=add_special_tokens)
        return [self._own_ids.get(token_id, token_id) for token_id in whole.ids]

    def _encodings(self, text: str) -> Iterator[Encoding]:
        found = self._guarded.encode_batch([text], add_special_tokens=False)[0]
        if self._all_ids.isdisjoint(found.ids):
            yield found
            return
        # The model itself can spell some control tokens, as words of its vocabulary. Cutting them in two makes them
        # ordinary text.
        pairs = zip(found.ids, found.offsets, strict=True)
        cuts = [
            start + 1 for token_id, (start, end) in pairs if token_id in self._all_ids and end > start + 1
        ]
        if not cuts:
            raise ValueError("a special token of this model can't be told from text")
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            yield from self._encodings(text[start:end])

    @cached_property
    def _all_ids(self) -> frozenset[int]:
        return frozenset(self.ids.values())

    @cached_property
    def _guarded(self) -> tokenizers.Tokenizer:
        guarded = tokenizers.Tokenizer(self._backend.model)
        guarded.normalizer = self._backend.normalizer
        guarded.pre_tokenizer = self._backend.pre_tokenizer
        guarded.post_processor = self._backend.post_processor
        added = sorted(self._backend.get_added_tokens_decoder().items())
        for token_id, token in added:
            guarded.add_tokens([_copied(token, token.content, special=token.content in self.ids)])
            if guarded.token_to_id(token.content) != token_id:
                raise ValueError(f"added token {token.content!r}: its id depends on the order of the others")
        guarded.add_tokens(
            [
                _copied(token, token.content + self._mark, special=False)
                for _, token in added
                if token.content in self.ids
            ]
        )
        guarded.encode_special_tokens = True
        return guarded

    @cached_property
    def _own_ids(self) -> dict[int, int]:
        """Maps the id of each control token's marked form to its own id."""
        marked = {token: self._guarded.token_to_id(token + self._mark) for token in self.ids}
        return {marked_id: self.ids[token] for token, marked_id in marked.items() if marked_id is not None}


def _copied(token: AddedToken, content: str, special: bool) -> AddedToken:
    return AddedToken(
        content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=special,
    )


def _one_of(texts: list[str]) -> str:
    """Returns a pattern that matches the longest of the texts at a position.

    It looks at each character a few times at most. A plain alternation of hundreds of texts with a common prefix would
    try all of them at every occurrence of that prefix.
    """
    by_first: dict[str, list[str]] = {}
    for text in filter(None, texts):
        by_first.setdefault(text[0], []).append(text[1:])
    found = [re.escape(first) + _one_of(rest) for first, rest in by_first.items()]
    pattern = f"(?:{'|'.join(found)})" if len(found) > 1 or "" in texts else "".join(found)
    return f"{pattern}?" if found and "" in texts else pattern if found else ""


def _unknown_token(backend: tokenizers.Tokenizer) -> str | None:
    """Returns the token for characters that the vocabulary lacks; it also occurs in harmless texts. None for byte-level
    vocabularies, which lack no character."""
    spec = json.loads(backend.to_str())
    model = spec["model"]
    if (spec["decoder"] or {}).get("type") == "ByteLevel":
        return None
    if model.get("unk_id") is not None:
        return str(model["vocab"][model["unk_id"]][0])
    unknown: str | None = model.get("unk_token")
    return unknown
