"""Requests with adapters in an island of real processes, any of which may die: the tokens are the engine's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from alignedserve.types import InstanceId
from tests.cluster.processes import COLOCATED, DECODES, POOL, PREFILLS, ROUTER, Setup, running
from tests.cluster.scene import Scene
from tests.tiny_adapters import write_adapter

Directory = Callable[[str], Path]
FAMILY = "llama-gqa-tied"


@pytest.fixture(scope="module")
def scenes(tiny_model: Directory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Scene]]:
    """Each started once."""
    made: dict[Setup, Scene] = {}
    model, adapters = tiny_model(FAMILY), tmp_path_factory.mktemp("adapters")
    modules = tuple(
        f"{name}={write_adapter(adapters / name, model, seed, r=seed + 3)}"
        for seed, name in enumerate(("one", "two", "three"))
    )
    with ExitStack() as stack:

        def scene(**options: object) -> Scene:
            setup = Setup(model, lora_modules=modules, **options)  # type: ignore[arg-type]
            if setup not in made:
                made[setup] = Scene(stack.enter_context(running(setup, tmp_path_factory.mktemp("events"))))
            return made[setup]

        yield scene


@pytest.mark.parametrize(
    ("options", "victims"),
    [
        ({"link": "host"}, (DECODES[0],)),
        ({"link": "host"}, (PREFILLS[0],)),
        ({"link": "ipc"}, (DECODES[0], PREFILLS[1])),
        ({"link": "ipc"}, (POOL, ROUTER)),
        ({"num_colocated": 1}, (COLOCATED,)),
    ],
)
def test_killed_in_mid_stream(
    scenes: Callable[..., Scene], options: dict[str, object], victims: Sequence[InstanceId]
) -> None:
    scenes(**options).kill_in_turn(victims)
