from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import tiny_models


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of a random model of the named family, made once."""
    built: dict[str, Path] = {}

    def directory(name: str) -> Path:
        if name not in built:
            built[name] = tiny_models.build(name, tmp_path_factory.mktemp(name))
        return built[name]

    return directory
