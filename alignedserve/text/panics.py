"""Panics of the tokenizers library, which are exceptions that no `except Exception` catches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

# The name of the exception's class, which can't be imported.
_PANIC = "PanicException"
_MAX_CHARS = 200


@contextmanager
def panics_are_errors() -> Iterator[None]:
    """Turns a panic into a ValueError of one line."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != _PANIC:
            raise
        reason = " ".join(str(error).split())[:_MAX_CHARS]
        raise ValueError(f"the model's tokenizer failed: {reason}") from None
