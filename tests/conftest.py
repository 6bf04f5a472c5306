from __future__ import annotations

import os

import torch

# Without a GPU, Triton's kernels are tested in its interpreter. Triton decides that when it is first imported, and
# transformers, among others, imports it.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from alignedserve.engine.engine import Engine
from tests import tiny_models

# torch's threads spin while they wait for each other: on a machine where another process has one of the cores, tiny
# operations on two threads take a hundred times as long as on one. What threads change is tested in tests/kernels.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The file that takes longest first: with two workers (`make test`), all others run beside it."""
    items.sort(key=lambda item: item.path.name != "test_serve.py")


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Profiles that tests make, and those of processes that they start, are kept apart from the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of a random model of the named family, made once."""
    built: dict[str, Path] = {}

    def directory(name: str) -> Path:
        if name not in built:
            built[name] = tiny_models.build(name, tmp_path_factory.mktemp(name))
        return built[name]

    return directory


@pytest.fixture(scope="session")
def all_engines() -> Iterator[weakref.WeakSet[Engine]]:
    engines: weakref.WeakSet[Engine] = weakref.WeakSet()
    patch = pytest.MonkeyPatch()
    plain = Engine.__init__

    def registered(self: Engine, *args: Any, **options: Any) -> None:
        plain(self, *args, **options)
        engines.add(self)

    patch.setattr(Engine, "__init__", registered)
    yield engines
    patch.undo()


@pytest.fixture(autouse=True)
def no_test_leaks_a_block(all_engines: weakref.WeakSet[Engine]) -> Iterator[None]:
    yield
    for engine in list(all_engines):
        engine.check_idle()
