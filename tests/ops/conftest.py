from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernels.triton import interpreter


@pytest.fixture(autouse=True, scope="module")
def quick_interpreter() -> Iterator[None]:
    with interpreter.quickened():
        yield
