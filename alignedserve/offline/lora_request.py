"""The adapter of a prompt in the offline API, with vLLM's names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from alignedserve.protocol.messages import AdapterAt
from alignedserve.types import InvalidRequest


@dataclass(frozen=True)
class LoRARequest:
    """An adapter. The number exists for vLLM's scripts and has no effect."""

    lora_name: str
    lora_int_id: int = 0
    # Directory, which must be the one given to LLM; empty for any.
    lora_path: str = ""


Asked = LoRARequest | str | None
# The types of LLM's lora_modules.
Modules = Mapping[str, str] | Iterable[str | LoRARequest]


def texts_of(modules: Modules) -> tuple[str, ...]:
    """Returns the adapters in the form of EngineConfig."""
    if isinstance(modules, Mapping):
        modules = [LoRARequest(name, 0, str(path)) for name, path in modules.items()]
    if isinstance(modules, str):
        modules = [modules]
    return tuple(
        each if isinstance(each, str) else json.dumps({"name": each.lora_name, "path": each.lora_path})
        for each in modules
    )


def adapters_of(
    asked: Asked | Sequence[Asked], num_prompts: int, known: Mapping[str, AdapterAt]
) -> list[str]:
    """Returns each prompt's adapter; empty for none. `known`: the loaded ones by name.

    Raises InvalidRequest for an adapter that is not loaded.
    """
    each = [asked] * num_prompts if asked is None or isinstance(asked, (str, LoRARequest)) else list(asked)
    if len(each) != num_prompts:
        raise InvalidRequest(f"lora_request: {len(each)} given for {num_prompts} prompts; one or one each")
    return [_adapter_of(one, known) for one in each]


def _adapter_of(asked: Asked, known: Mapping[str, AdapterAt]) -> str:
    if asked is None:
        return ""
    name, path = (asked, "") if isinstance(asked, str) else (asked.lora_name, asked.lora_path)
    if name not in known:
        raise InvalidRequest(
            f"lora_request: {name!r} is not loaded: load_lora_adapter loads it; or load it with the model, as "
            f"LLM(..., lora_modules={{{name!r}: {path or 'path'!r}}}); loaded are {', '.join(known) or 'none'}"
        )
    if path and path != known[name].path:
        raise InvalidRequest(
            f"lora_request: the path of {name!r} is {path!r}; it was loaded from {known[name].path!r}"
        )
    return known[name].adapter
