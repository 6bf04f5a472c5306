"""Resolves a model's name: a directory, a GGUF file, a preset, or a repository on the Hugging Face hub. Needs no
torch."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from alignedserve.models import packaged
from alignedserve.models.config import ModelConfig
from alignedserve.models.hf_config import load_model_config
from alignedserve.models.packaged import is_packaged
from alignedserve.models.presets import PRESETS

# "auto" and "safetensors" mean the same; vLLM's scripts use either.
LOAD_FORMATS = ("auto", "safetensors", "dummy")
SMALL_FILES = ("*.json", "*.jinja", "merges.txt")
# Never *.bin or *.pt, because unpickling runs code.
WEIGHT_FILES = ("*.safetensors",)
GGUF_SUFFIX = ".gguf"
# A file's quantisation is the last part of its name, before the number of a part.
_OF_QUANTISATION = re.compile(r"(?:^|[-./])((?:UD-)?\w+?)(?:-(\d{5})-of-\d{5})?\.gguf$")
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
    """Prefers a directory or GGUF file to a preset, and a preset to a repository on the hub.

    A quantisation may follow the name of a repository of GGUF files, as in org/name:Q4_K_M.

    Downloads what the hub's cache lacks; with load_format "dummy", no weights. Raises ValueError if `model` is none of
    the three, or is not a supported model. Raises NotInCache if the model is not cached and `may_download` is False.
    """
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load_format is {load_format!r}; must be one of {', '.join(LOAD_FORMATS)}")
    name, is_dummy = str(model), load_format == "dummy"
    path = Path(os.path.expanduser(model))
    repository, _, quantisation = name.partition(":")
    is_on_hub = not path.exists() and bool(quantisation) and _looks_like_repository(repository)
    if is_on_hub:
        path = _fetch_gguf(repository, quantisation, revision, may_download)
    if is_packaged(name):
        path = _packaged(name, may_download)
    if path.is_file() and path.suffix == GGUF_SUFFIX:
        directory = _directory_of_gguf(path)
        return Location(name, load_model_config(directory), directory, is_dummy, is_cached=is_on_hub)
    if path.exists() and not path.is_dir():
        raise ValueError(f"model is {name!r}, which is a file; must be a directory, or a {GGUF_SUFFIX} file")
    if not path.is_dir() and name in PRESETS:
        return Location(name, _preset(name, load_format), directory=None, is_dummy=True)
    directory = path
    if not path.is_dir():
        directory = _fetch(
            name, revision, SMALL_FILES if is_dummy else SMALL_FILES + WEIGHT_FILES, may_download
        )
        _refuse_gguf_repository(name, directory)
    return Location(name, load_model_config(directory), directory, is_dummy, is_cached=not path.is_dir())


def _directory_of_gguf(path: Path) -> Path:
    # Most models don't need it.
    from alignedserve.models.gguf.directory import directory_of_file

    return directory_of_file(path)


def _packaged(name: str, may_download: bool) -> Path:
    path = packaged.found(name)
    if path is None and not may_download:
        raise NotInCache(f"model is {name!r}, which is not here yet")
    return path or packaged.fetch(name)


def _preset(name: str, load_format: str) -> ModelConfig:
    if load_format != "dummy":
        raise ValueError(
            f"load_format is {load_format!r} for the preset {name}, which is a shape without weights; "
            'must be "dummy"'
        )
    return PRESETS[name]


def _refuse_gguf_repository(name: str, directory: Path) -> None:
    if not (directory / "config.json").is_file():
        raise ValueError(
            f"model is {name!r}, which holds no config.json; if it holds GGUF files, name one, as in {name}:Q4_K_M"
        )


def _fetch_gguf(repository: str, quantisation: str, revision: str | None, may_download: bool) -> Path:
    """Returns the first file of this quantisation. Raises ValueError with those that there are if it is not among
    them."""
    names = _files_on_hub(repository, revision) if may_download else []
    if not names:
        cached = _fetch(repository, revision, (), may_download)
        names = [str(path.relative_to(cached)) for path in cached.rglob(f"*{GGUF_SUFFIX}")]
    found = {
        name: each
        for name in sorted(names)
        if (each := _OF_QUANTISATION.search(name)) and "mmproj" not in name
    }
    chosen = [name for name, each in found.items() if each[1].lower() == quantisation.lower()]
    firsts = [name for name in chosen if found[name][2] in (None, "00001")]
    if len(firsts) != 1:
        which = ", ".join(firsts or dict.fromkeys(each[1] for each in found.values())) or "no GGUF files"
        raise ValueError(
            f"model is '{repository}:{quantisation}'; must name one quantization of those that are there: {which}"
        )
    return _fetch(repository, revision, tuple(chosen), may_download) / firsts[0]


def _files_on_hub(repository: str, revision: str | None) -> list[str]:
    """Returns nothing if the hub can't be asked."""
    try:
        return huggingface_hub.list_repo_files(repository, revision=revision)
    except Exception:
        # The hub's client does not wrap the exceptions of its HTTP library. The download reports what is wrong.
        return []


def _fetch(name: str, revision: str | None, patterns: tuple[str, ...], may_download: bool) -> Path:
    """Returns the directory in the hub's cache, in which the files with these patterns are."""
    if not _looks_like_repository(name):
        raise ValueError(
            f"model is {name!r}; must be an existing directory, a GGUF file, the name of a hub repository (org/name), "
            f"or with load_format dummy a preset: {', '.join(PRESETS)}"
        )
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
