"""Fixtures for tests of real processes: running islands that tests borrow one after the other."""

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
# What a test has borrowed.
_BORROWED = pytest.StashKey[list[tuple[Islands, Processes]]]()
_HAS_FAILED = pytest.StashKey[bool]()
# Islands in this run that did not end as they should.
_NOT_ENDED = pytest.StashKey[list[str]]()


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
    has_failed = report.when != "setup" and item.stash.get(_HAS_FAILED, False)
    item.stash[_HAS_FAILED] = report.failed or has_failed
    if report.when == "teardown" and report.failed:
        _discard_borrowed(item)
    return report


def _discard_borrowed(item: pytest.Item) -> None:
    for islands, processes in item.stash.get(_BORROWED, []):
        islands.discard(processes)


@pytest.fixture(scope="module", autouse=True)
def islands(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Islands]:
    """One per file, because idle processes would take time and memory from the tests in all other files. Tests that
    borrow nothing also use it: one of them may be the file's last, and therefore the one that is run again."""
    not_ended = request.config.stash.setdefault(_NOT_ENDED, [])
    made = Islands(lambda: tmp_path_factory.mktemp("events"), not_ended)
    made.check_all_ended()
    try:
        yield made
        made.end_all()
    finally:
        made.clean_up()


@pytest.fixture
def borrow(request: pytest.FixtureRequest, islands: Islands, tiny_model: Directory) -> Iterator[Borrow]:
    """Lends running processes of a kind. If a test fails, the processes that it had are not used again."""
    borrowed = request.node.stash[_BORROWED] = list[tuple[Islands, Processes]]()

    def of_kind(family: str = FAMILY, **options: Any) -> Processes:
        processes = islands.borrow(Setup(tiny_model(family), **options))
        borrowed.append((islands, processes))
        return processes

    yield of_kind
    if request.node.stash[_HAS_FAILED]:
        _discard_borrowed(request.node)
    else:
        for _, each in borrowed:
            islands.give_back(each)


@pytest.fixture
def scenes(borrow: Borrow) -> Scenes:
    def scene(family: str = FAMILY, **options: Any) -> Scene:
        return Scene(borrow(family, **options))

    return scene


@pytest.fixture(params=[pytest.param(0, id="apart"), pytest.param(1, id="colocated", marks=pytest.mark.slow)])
def slow_processes(request: pytest.FixtureRequest, borrow: Borrow) -> Processes:
    """Prefill and decode instances, then a colocated one, all so slow that one can be killed while it works."""
    return borrow(num_colocated=request.param, is_slow=True)


@pytest.fixture(scope="session")
def lora_modules(tiny_model: Directory, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Three adapters of different ranks, as a command line names them."""
    model, adapters = tiny_model(FAMILY), tmp_path_factory.mktemp("adapters")
    return tuple(
        f"{name}={write_adapter(adapters / name, model, seed, r=seed + 3)}"
        for seed, name in enumerate(("one", "two", "three"))
    )
