from __future__ import annotations

import os

import torch

# Without a GPU, Triton's kernels are tested in its interpreter. Triton decides this when it is first imported, and
# transformers, among others, imports it.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from alignedserve.engine.engine import Engine
from alignedserve.instance.memory import BlockManager
from alignedserve.instance.worker import Worker
from tests import draws, second_runs, timings

# torch's threads spin while they wait for each other. If another process uses one of the cores, tiny operations take a
# hundred times as long on two threads as on one. The effects of threads are tested in tests/kernels.
torch.set_num_threads(1)


# A failing property test tells how to repeat it: seeds and other arguments, and a blob for `reproduce_failure`. An
# example's duration depends on the machine, so it is not limited.
settings.register_profile(
    "tests", print_blob=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")

# Folders and files with tests that start processes or listen on sockets. One may fail because the machine is busy, so
# it is run once more (tests/second_runs.py).
LIVE = (
    "benchmarks/test_agents_live.py",
    "benchmarks/test_arena_live.py",
    "benchmarks/test_attacks.py",
    "benchmarks/test_gpu_first.py",
    "bench",
    "benchmarks/test_gpu_parts.py",
    "benchmarks/test_sim_vs_live.py",
    "benchmarks/test_soak.py",
    "cli",
    "clients",
    "cluster",
    "deploy",
    "gateway",
    "instance",
    "kvpool/test_segment.py",
    "launch",
    "process/test_child.py",
    "protocol/test_connections.py",
    "router/test_fence.py",
    "router/test_server.py",
    "store",
    "transport",
)


# The slowest files, including those with tests that run in turns. They start first, so that none is left alone at the
# end.
LONGEST = (
    "test_ray_up.py",
    "test_ray_up_machines.py",
    "test_arm.py",
    "test_serve.py",
    "test_formats.py",
    "test_kill.py",
    "test_gateways.py",
    "test_ranks.py",
    "test_clients.py",
    "test_triton.py",
    "test_triton_quantised.py",
    "test_dockerfile.py",
    "test_island_gateways.py",
    "test_ends.py",
    "test_autoscaler.py",
    "test_islands.py",
    "test_older_processors.py",
    "test_soak.py",
    "test_batches.py",
    "test_files_apart.py",
    "test_gpu_first.py",
)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    for plugin in (draws, timings):
        if not pluginmanager.is_registered(plugin):
            pluginmanager.register(plugin)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sorts the slowest files first, so that all others run beside them."""
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
    second_runs.allow(items, [config.rootpath / "tests" / name for name in LIVE])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    second_runs.end_spoilt_fixtures(item)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    second_runs.tell(terminalreporter)


@pytest.hookimpl(tryfirst=True)
def pytest_internalerror(excrepr: object) -> None:
    _internal_errors.append(str(excrepr))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run in which a worker broke down is a failed one, which xdist sometimes forgets."""
    if _internal_errors:
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


def pytest_unconfigure(config: pytest.Config) -> None:
    """Repeats the first internal error as the last lines: xdist says where a worker broke down, and after it that the
    worker had not finished, which takes as many lines."""
    if _internal_errors and not hasattr(config, "workerinput"):
        print(f"\nthe first internal error:\n{_internal_errors[0][-2000:]}")


_internal_errors: list[str] = []


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps profiles made by tests, and by processes that they start, separate from the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the directory of a random model in the named family, made once."""
    # This imports transformers, which takes longer than everything else here.
    from tests import tiny_models

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


@pytest.fixture(scope="session")
def all_memories() -> Iterator[weakref.WeakSet[BlockManager]]:
    """Those of workers with real engines. Simulated instances check theirs after each iteration."""
    memories: weakref.WeakSet[BlockManager] = weakref.WeakSet()
    patch = pytest.MonkeyPatch()
    plain = Worker.__init__

    def registered(self: Worker, *args: Any, **options: Any) -> None:
        plain(self, *args, **options)
        if isinstance(self.engine, Engine):
            memories.add(self.memory)

    patch.setattr(Worker, "__init__", registered)
    yield memories
    patch.undo()


@pytest.fixture(autouse=True)
def no_test_leaks_a_block(
    all_engines: weakref.WeakSet[Engine], all_memories: weakref.WeakSet[BlockManager]
) -> Iterator[None]:
    yield
    for memory in list(all_memories):
        try:
            memory.check()
        except RuntimeError:
            all_memories.discard(memory)
            raise
    for engine in list(all_engines):
        try:
            engine.check_idle()
        except RuntimeError:
            # What a failed test left behind must not make all later tests fail.
            all_engines.discard(engine)
            raise
