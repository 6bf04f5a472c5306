"""Checked reading of a JSON object. An error names the file, the key, its value and what is allowed."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# The most characters of a value that a message shows from its beginning, and from its end.
MAX_SHOWN_CHARS = 100


def read_json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__}; must be an object")
    return value


# Kernels count in 32 bits.
MAX_SIZE = 2**31 - 1


class Fields:
    """A JSON object with typed getters. A null key counts as absent. A getter without a default requires the key."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def over(self, defaults: Mapping[str, Any]) -> Fields:
        """Returns the same object with defaults for absent or null keys."""
        given = {key: value for key, value in self.values.items() if value is not None or key not in defaults}
        return Fields({**defaults, **given}, self.where)

    def error(self, key: str, allowed: str) -> ValueError:
        if self.get(key) is None:
            return ValueError(f"{self.where}: {key} is missing; must be {allowed}")
        return ValueError(f"{self.where}: {key} is {shown(self.values[key])}; must be {allowed}")

    def size(self, key: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        value = self._or_default(key, default)
        if type(value) is not int or not 1 <= value <= most:
            raise self.error(key, f"a positive integer, at most {most}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self._or_default(key, default)
        if not _is_positive(value):
            raise self.error(key, "a positive number")
        return float(value)

    def positives(self, key: str, num: int) -> tuple[float, ...]:
        values = self.get(key)
        if not isinstance(values, list) or len(values) != num or not all(map(_is_positive, values)):
            raise self.error(key, f"a list of {num} positive numbers")
        return tuple(float(value) for value in values)

    def flag(self, key: str, default: bool) -> bool:
        value = self._or_default(key, default)
        if type(value) is not bool:
            raise self.error(key, "true or false")
        return value

    def choice(self, key: str, names: Mapping[str, str], default: str) -> str:
        """Returns what `names` maps the value to."""
        value = self._or_default(key, default)
        if not isinstance(value, str) or value not in names:
            raise self.error(key, "one of " + ", ".join(names))
        return names[value]

    def nested(self, key: str) -> Fields | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, "an object")
        return Fields(value, f"{self.where}: {key}")

    def token_id(self, key: str, default: int | None = None) -> int | None:
        ids = self.token_ids(key, () if default is None else (default,))
        return ids[0] if ids else None

    def token_ids(self, key: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Returns the ids of one id or a list of ids. -1, an old way to write "none", and null give no ids."""
        value = self.values.get(key, list(default))
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(token) is not int or token < -1 for token in ids):
            raise self.error(key, "a token id, or a list of token ids")
        return tuple(token for token in ids if token >= 0)

    def _or_default(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        return default if value is None else value


def shown(value: Any) -> str:
    """Returns the value for a message: a file may have any, of any length."""
    text = repr(value)
    if len(text) <= 2 * MAX_SHOWN_CHARS:
        return text
    return f"{text[:MAX_SHOWN_CHARS]} … {text[-MAX_SHOWN_CHARS:]}"


def _is_positive(value: Any) -> bool:
    # JSON integers may be larger than any float.
    return type(value) in (int, float) and 0 < value <= sys.float_info.max
