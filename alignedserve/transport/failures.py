"""The failures of a connection: the peer dies, hangs or sends a wrong message, or torch's process group breaks."""

from __future__ import annotations

import msgspec

# torch reports a broken process group as a RuntimeError.
CONNECTION_FAILURES = (OSError, RuntimeError, msgspec.MsgspecError)


def describe(error: BaseException) -> str:
    """Returns the first line of the error for people, with its type if the text says little."""
    text = str(error).strip().split("\n")[0]
    return text if isinstance(error, OSError) and text else f"{type(error).__name__}: {text}"


def unexpected(frame: object, expected: str) -> ConnectionError:
    return ConnectionError(f"{type(frame).__name__} came from the other end where {expected} was due")
