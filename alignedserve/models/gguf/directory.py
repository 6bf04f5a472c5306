"""A model directory for GGUF files, in the cache: small files as on the hub, and links to the GGUF files.

It is made once for each version of a file. What reads model directories needs not know that it was a GGUF file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from alignedserve.models.cache import MAKING, in_cache, remove_left
from alignedserve.models.fields import shown
from alignedserve.models.gguf.config import config_of, generation_config_of
from alignedserve.models.gguf.container import Header, read_header
from alignedserve.models.gguf.file_names import parts_of
from alignedserve.models.gguf.tokenizer import has_tokenizer, tokenizer_config_of, tokenizer_of
from alignedserve.models.hf_config import model_config_from_dict

# A new number makes all directories anew: it changes with what is written into them.
VERSION = 2


def link_name(number: int) -> str:
    return f"from-{number:05}.gguf"


def linked_files(directory: Path) -> list[Path]:
    """The GGUF files of the directory, if it was made here."""
    return sorted(directory.glob("from-?????.gguf"))


def refuse_other_version(directory: Path) -> None:
    """Raises ValueError if a file is not the one that the directory was made of. A server's other parts may have read
    the directory before."""
    files = [path.resolve() for path in linked_files(directory)]
    if _key(files) != directory.resolve().name:
        raise ValueError(f"{files[0]}: was replaced since {directory} was made; start the whole server again")


def directory_of_file(path: Path) -> Path:
    """Returns the directory for a file, or for the first of several. Raises ValueError if they hold no model."""
    files = parts_of(path)
    directory = in_cache("gguf") / _key(files)
    if not directory.is_dir():
        _write(directory, whole(read_headers(files)), files)
    return directory


def read_headers(files: list[Path]) -> list[Header]:
    """Raises ValueError unless the files are all parts of one model."""
    headers, seen = [read_header(path) for path in files], set()
    for number, header in enumerate(headers):
        for key, must in {"no": number, "count": len(headers)}.items():
            found = header.metadata.get(f"split.{key}", 0 if key == "no" else 1)
            if type(found) is not int or found != must:
                raise ValueError(
                    f"{header.path}: split.{key} is {shown(found)}; must be {must}, as in its name"
                )
        for name in header.tensors:
            if name in seen:
                raise ValueError(f"{header.path}: {name} is in a file before it, too")
            seen.add(name)
    return headers


def whole(headers: list[Header]) -> Header:
    """Returns the first header, which has the metadata, with the tensors of all."""
    first, *rest = headers
    tensors, factors = dict(first.tensors), dict(first.factors)
    for each in rest:
        tensors |= each.tensors
        factors |= each.factors
    return Header(first.path, first.metadata, tensors, factors)


def _key(files: list[Path]) -> str:
    """Differs if another version of a file is at the same path."""
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(json.dumps([VERSION, stats]).encode()).hexdigest()[:32]


def _write(directory: Path, header: Header, files: list[Path]) -> None:
    """Another process may do the same: the first one's directory stays."""
    config, generation = config_of(header), generation_config_of(header)
    # Raises the errors of the configuration with the file's own name.
    model_config_from_dict(config, generation, where=str(header.path))
    texts = {"config.json": config, "generation_config.json": generation}
    if has_tokenizer(header):
        texts |= {
            "tokenizer.json": tokenizer_of(header),
            "tokenizer_config.json": tokenizer_config_of(header),
        }
    made = None
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        remove_left(directory.parent)
        made = Path(tempfile.mkdtemp(dir=directory.parent, prefix=MAKING))
        for name, values in texts.items():
            _write_synced(made / name, _as_json(header, values))
        for number, path in enumerate(files):
            (made / link_name(number)).symlink_to(path)
        # The mode of temporary directories keeps other users out.
        made.chmod(0o755)
        made.rename(directory)
    except OSError as error:
        if directory.is_dir():
            return
        raise ValueError(
            f"{directory.parent}: what was read of {header.path} can't be written there: {error.strerror}; "
            "XDG_CACHE_HOME names another place"
        ) from error
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)


def _write_synced(path: Path, text: str) -> None:
    """A directory that is there has whole files, also after the machine's power fails."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _as_json(header: Header, values: dict[str, Any]) -> str:
    try:
        return json.dumps(values, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise ValueError(f"{header.path}: its metadata has a number that is not finite: {error}") from None
