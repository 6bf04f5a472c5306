"""The adapters that a server loads: `name=path`, or a JSON object, in the form of vLLM's --lora-modules."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import NamedTuple

# In the id of an adapter that was loaded while the system runs, what follows its name. No name has this character.
_VERSION = "\n"
# base_model_name is accepted, but ignored: an adapter belongs to the served model.
_KEYS = {"name", "path", "base_model_name"}


class LoraModule(NamedTuple):
    # The model name that clients use for it.
    name: str
    # Its directory.
    path: str


def adapter_id(name: str, digest: str) -> str:
    """Returns what the adapter is called inside the system, and its KV depends on: other weights under the same name
    are another adapter. An adapter of --lora-modules is called by its name alone."""
    return f"{name}{_VERSION}{digest}"


def name_of(adapter: str) -> str:
    """Returns the name that clients use for an adapter."""
    return adapter.partition(_VERSION)[0]


def parse_lora_modules(texts: Sequence[str]) -> tuple[LoraModule, ...]:
    """Raises ValueError if an entry is malformed, or if two have the same name."""
    modules = tuple(map(_parse, texts))
    names = [module.name for module in modules]
    for name in names:
        if not name.isprintable():
            raise ValueError(f"lora_modules: {name!r}: a name must be of printable characters")
        if names.count(name) > 1:
            raise ValueError(
                f"lora_modules: {name!r} is the name of {names.count(name)} adapters; names must be unique"
            )
    return modules


def with_absolute_paths(texts: Sequence[str]) -> tuple[str, ...]:
    """Returns the same adapters with absolute paths, for processes with other working directories."""
    return tuple(
        json.dumps({"name": name, "path": os.path.abspath(os.path.expanduser(path))})
        for name, path in parse_lora_modules(texts)
    )


def _parse(text: str) -> LoraModule:
    if text.lstrip().startswith("{"):
        return _from_json(text)
    name, _, path = text.partition("=")
    if not name or not path:
        raise ValueError(f"lora_modules: {text!r} must be name=path, or a JSON object with name and path")
    return LoraModule(name, path)


def _from_json(text: str) -> LoraModule:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"lora_modules: {text!r} is not valid JSON: {error}") from None
    if unknown := found.keys() - _KEYS:
        raise ValueError(
            f"lora_modules: {text!r} has {sorted(unknown)}; known are {', '.join(sorted(_KEYS))}"
        )
    name, path = found.get("name"), found.get("path")
    if not (isinstance(name, str) and isinstance(path, str) and name and path):
        raise ValueError(f"lora_modules: {text!r} must have name and path, both strings")
    return LoraModule(name, path)
