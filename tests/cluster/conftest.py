"""What the tests of real processes share: islands that run, which tests borrow one after the other."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.cluster.islands import Islands
from tests.cluster.processes import Processes, Setup
from tests.cluster.scene import Scene
from tests.tiny_adapters import write_adapter

FAMILY = "llama-gqa-tied"
Directory = Callable[[str], Path]
_HAS_FAILED = pytest.StashKey[bool]()


class Borrow(Protocol):
    def __call__(self, family: str = FAMILY, **options: Any) -> Processes:
        """`options`: fields of `Setup`."""


class Scenes(Protocol):
    def __call__(self, family: str = FAMILY, **options: Any) -> Scene:
        """`options`: fields of `Setup`."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[_HAS_FAILED] = report.failed
    return report


@pytest.fixture(scope="session")
def islands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Islands]:
    made = Islands(lambda: tmp_path_factory.mktemp("events"))
    try:
        yield made
        made.end_all()
    finally:
        made.clean_up()


@pytest.fixture
def borrow(request: pytest.FixtureRequest, islands: Islands, tiny_model: Directory) -> Iterator[Borrow]:
    """Running processes of a kind. A test that fails spoils those that it had."""
    borrowed: list[Processes] = []

    def of_kind(family: str = FAMILY, **options: Any) -> Processes:
        borrowed.append(islands.borrow(Setup(tiny_model(family), **options)))
        return borrowed[-1]

    yield of_kind
    if request.node.stash.get(_HAS_FAILED, False):
        for each in borrowed:
            islands.discard(each)


@pytest.fixture
def scenes(borrow: Borrow) -> Scenes:
    def scene(family: str = FAMILY, **options: Any) -> Scene:
        return Scene(borrow(family, **options))

    return scene


@pytest.fixture(params=[pytest.param(0, id="apart"), pytest.param(1, id="colocated", marks=pytest.mark.slow)])
def slow_processes(request: pytest.FixtureRequest, borrow: Borrow) -> Processes:
    """Prefill and decode instances, then a colocated one: so slow that one can be killed in the middle."""
    return borrow(num_colocated=request.param, is_slow=True)


@pytest.fixture(scope="session")
def lora_modules(tiny_model: Directory, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Three adapters of different ranks, as a command line names them."""
    model, adapters = tiny_model(FAMILY), tmp_path_factory.mktemp("adapters")
    return tuple(
        f"{name}={write_adapter(adapters / name, model, seed, r=seed + 3)}"
        for seed, name in enumerate(("one", "two", "three"))
    )
