"""The names of GGUF files. A model in several files has one for each part, as in NAME-00001-of-00003.gguf."""

from __future__ import annotations

import re
from pathlib import Path

SUFFIX = ".gguf"
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def model_name(model: str) -> str:
    """Returns the name of a file without its folder, its ending and the number of a part. Other models keep theirs."""
    if not model.endswith(SUFFIX):
        return model
    found = _SPLIT.fullmatch(Path(model).name)
    return found[1] if found else Path(model).name.removesuffix(SUFFIX)


def parts_of(path: Path) -> list[Path]:
    """Returns the files of a model by its first. Raises ValueError if one is missing."""
    found = _SPLIT.fullmatch(path.name)
    if found is None:
        return [path.resolve()]
    count = int(found[3])
    if int(found[2]) != 1 or not 1 <= count <= 9999:
        raise ValueError(f"model is '{path}'; must be the first of the {count} files, -00001-of-{found[3]}")
    files = [
        path.with_name(f"{found[1]}-{number:05}-of-{found[3]}{SUFFIX}") for number in range(1, count + 1)
    ]
    missing = [each.name for each in files if not each.is_file()]
    if missing:
        raise ValueError(f"{path}: of its {count} files {', '.join(missing[:5])} is missing")
    return [each.resolve() for each in files]
