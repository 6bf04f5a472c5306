"""Handles panics of the tokenizers library. They are exceptions that no `except Exception` catches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import tokenizers

# The name of the exception's class, which can't be imported.
_PANIC = "PanicException"
_MAX_CHARS = 200


@contextmanager
def panics_are_errors() -> Iterator[None]:
    """Turns a panic into a ValueError of one line."""
    try:
        yield
    except BaseException as error:
        raise _as_error(error) from None


def decoded(backend: tokenizers.Tokenizer, ids: Sequence[int], skip_special_tokens: bool) -> str:
    """Returns the text of the ids. It must be fast: it is called for each token."""
    try:
        return backend.decode(ids, skip_special_tokens=skip_special_tokens)
    except BaseException as error:
        raise _as_error(error) from None


def _as_error(error: BaseException) -> BaseException:
    if type(error).__name__ != _PANIC:
        return error
    reason = " ".join(str(error).split())[:_MAX_CHARS]
    return ValueError(f"the model's tokenizer failed: {reason}")
