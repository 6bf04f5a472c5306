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
from hypothesis import HealthCheck, settings

from alignedserve.engine.engine import Engine
from tests import draws, second_runs, timings

# torch's threads spin while they wait for each other: on a machine where another process has one of the cores, tiny
# operations on two threads take a hundred times as long as on one. What threads change is tested in tests/kernels.
torch.set_num_threads(1)


# A property test that fails says how to repeat that: seeds and other arguments, and a blob for `reproduce_failure`. How
# long an example takes is the machine's affair.
settings.register_profile(
    "tests", print_blob=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")

# The folders, and files of other folders, whose tests start processes or listen on sockets: how busy the machine is may
# make one fail, and it runs once more (tests/second_runs.py).
LIVE = (
    "benchmarks/test_gpu_first.py",
    "benchmarks/test_sim_vs_live.py",
    "bench",
    "benchmarks/test_gpu_parts.py",
    "cli",
    "clients",
    "cluster",
    "deploy",
    "gateway",
    "instance",
    "kvpool/test_segment.py",
    "launch",
    "router/test_fence.py",
    "router/test_server.py",
    "store",
    "test_child.py",
    "test_wire.py",
    "transport",
)


# The files that take longest, and those of turns that may. They begin first, so that none is left alone at the end.
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
    """The files that take longest first: all others run beside them."""
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
    second_runs.allow(items, [config.rootpath / "tests" / name for name in LIVE])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    second_runs.end_spoilt_fixtures(item)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    second_runs.tell(terminalreporter)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Profiles that tests make, and those of processes that they start, are kept apart from the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of a random model of the named family, made once."""
    # it imports transformers, which takes longer than all else here
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


@pytest.fixture(autouse=True)
def no_test_leaks_a_block(all_engines: weakref.WeakSet[Engine]) -> Iterator[None]:
    yield
    for engine in list(all_engines):
        try:
            engine.check_idle()
        except RuntimeError:
            # What a failed test has left is that test's failure, and not that of all the following ones.
            all_engines.discard(engine)
            raise
