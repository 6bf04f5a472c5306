"""Resolves a model's name: a directory, a preset, or a repository on the Hugging Face hub. Needs no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from alignedserve.models.config import ModelConfig
from alignedserve.models.hf_config import load_model_config
from alignedserve.models.presets import PRESETS

# "auto" and "safetensors" mean the same; vLLM's scripts use either.
LOAD_FORMATS = ("auto", "safetensors", "dummy")
SMALL_FILES = ("*.json", "*.jinja", "merges.txt")
# Never *.bin or *.pt, because unpickling runs code.
WEIGHT_FILES = ("*.safetensors",)
# The same weights in another layout, which Meta's and Mistral's repositories have, too.
OTHER_LAYOUTS = ("consolidated*", "original/*", "*/*.safetensors")


@dataclass(frozen=True)
class Location:
    name: str
    config: ModelConfig
    # None for a preset, which has no files and so no tokenizer.
    directory: Path | None
    is_dummy: bool
    # Whether the directory is in the hub's cache, which may lack files.
    is_cached: bool = False


class NotInCache(ValueError):
    """The model may be on the hub, but it is not in the cache."""


def locate_model(
    model: str | Path, load_format: str = "auto", revision: str | None = None, may_download: bool = True
) -> Location:
    """Prefers a directory to a preset, and a preset to a repository on the hub.

    Downloads what the hub's cache lacks; with load_format "dummy", no weights. Raises ValueError if `model` is none of
    the three, or is not a supported model. Raises NotInCache if the model is not cached and `may_download` is False.
    """
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load_format is {load_format!r}; must be one of {', '.join(LOAD_FORMATS)}")
    name, is_dummy = str(model), load_format == "dummy"
    path = Path(os.path.expanduser(model))
    if path.exists() and not path.is_dir():
        raise ValueError(f"model is {name!r}, which is a file; must be the directory of a model")
    if not path.is_dir() and name in PRESETS:
        return Location(name, _preset(name, load_format), directory=None, is_dummy=True)
    directory = path if path.is_dir() else _fetch(name, revision, not is_dummy, may_download)
    return Location(name, load_model_config(directory), directory, is_dummy, is_cached=not path.is_dir())


def _preset(name: str, load_format: str) -> ModelConfig:
    if load_format != "dummy":
        raise ValueError(
            f"load_format is {load_format!r} for the preset {name}, which is a shape without weights; "
            'must be "dummy"'
        )
    return PRESETS[name]


def _fetch(name: str, revision: str | None, with_weights: bool, may_download: bool) -> Path:
    if not _looks_like_repository(name):
        raise ValueError(
            f"model is {name!r}; must be an existing directory, the name of a hub repository (org/name), "
            f"or with load_format dummy a preset: {', '.join(PRESETS)}"
        )
    patterns = SMALL_FILES + WEIGHT_FILES if with_weights else SMALL_FILES
    try:
        path = huggingface_hub.snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(OTHER_LAYOUTS),
            local_files_only=not may_download,
        )
    except GatedRepoError as error:
        raise ValueError(f"model {name!r} is gated on the hub; request access and log in: {error}") from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"model is {name!r}, which is neither a directory here nor a repository on the hub"
        ) from error
    except RevisionNotFoundError as error:
        raise ValueError(f"revision is {revision!r}; must exist in the hub repository {name}") from error
    except Exception as error:
        if not may_download and isinstance(error, LocalEntryNotFoundError):
            raise NotInCache(f"model is {name!r}, which is not in the hub's cache here") from error
        # The hub's client does not wrap the exceptions of its HTTP library.
        raise ValueError(
            f"model is {name!r}, which is not a directory here and cannot be fetched from the hub: {error}"
        ) from error
    return Path(path)


def _looks_like_repository(name: str) -> bool:
    parts = name.split("/")
    return len(parts) == 2 and all(parts) and name[0] not in ".~\\"
