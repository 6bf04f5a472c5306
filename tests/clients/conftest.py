from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.model import make_model
from tests.launch.server import serving

OPTIONS = ("--device", "cpu", "--served-model-name", "demo", "--length-predictor", "none")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    """The URL of one server for all clients."""
    with serving(str(model), *OPTIONS) as server:
        yield server.url
