"""Which nodes of a cluster may be islands, and what its autoscaler is asked for, with a Ray that says what it is told;
test_autoscaler.py has a real one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from ray.autoscaler import sdk

from alignedserve.launch.config import LaunchConfig
from alignedserve.launch.nodes import ClusterNodes


@dataclass
class Ray:
    # The resources of each node.
    there: dict[str, dict[str, float]] = field(default_factory=dict)

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": name, "Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": resources}
            for name, resources in self.there.items()
        ]

    def remote(self, probe: Any) -> Ray:
        """What is done remotely, which is asked for its options, and for its result."""

        class Remote:
            def options(self, **options: Any) -> Remote:
                return self

            def remote(self, host: str) -> tuple[int, int]:
                return 20_000, 1 << 30

        return Remote()  # type: ignore[return-value]

    def get_runtime_context(self) -> Any:
        class Context:
            def get_node_id(self) -> str:
                return C

        return Context()

    def get(self, result: Any, timeout: float) -> Any:
        return result


# Names of nodes as Ray has them, in order.
A, B, C = ("a" * 56, "b" * 56, "c" * 56)
HEAD = {"CPU": 8.0}
MARKED = {"CPU": 8.0, "island": 1.0}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, int]]]:
    found: list[list[dict[str, int]]] = []
    monkeypatch.setattr(sdk, "request_resources", lambda bundles: found.append(bundles))
    return found


def nodes(ray: Ray, least: int = 1, most: int | None = 3, needs_gpus: bool = False) -> ClusterNodes:
    config = LaunchConfig(address="auto", min_islands=least, max_islands=most)
    return ClusterNodes(ray, config, needs_gpus, "token")


def first(found: ClusterNodes) -> list[str | None]:
    return [node.node_id for node in found.first]


def test_marked_nodes_alone_are_islands_also_when_none_is_left(asked: list[Any]) -> None:
    ray = Ray({C: HEAD, A: MARKED, B: MARKED})
    found = nodes(ray)
    assert found.take_first() == 0 and first(found) == [A, B]
    assert all(node.is_marked for node in found.first)
    assert found.growth and found.growth.wanted == 2
    # One that comes without having been asked for is left alone.
    ray.there["d" * 56] = MARKED
    assert asyncio.run(found.look()).come == []
    del ray.there["d" * 56]
    del ray.there[A], ray.there[B]
    change = asyncio.run(found.look())
    assert (change.come, change.gone) == ([], [0, 1])


def test_without_marks_all_are_used_and_none_are_asked_for(asked: list[Any]) -> None:
    found = nodes(Ray({A: HEAD, B: HEAD}))
    assert found.take_first() == 0 and first(found) == [A, B]
    assert found.growth is None and not asked


def test_a_node_without_cpus_and_gpus_is_not_there_to_compute(asked: list[Any]) -> None:
    found = nodes(Ray({C: {"memory": 1.0}, A: HEAD}), most=None)
    assert found.take_first() == 0 and first(found) == [A]


def test_nodes_are_asked_for_at_first_then_as_wanted_and_at_the_end_none(asked: list[Any]) -> None:
    ray = Ray({C: HEAD})
    found = nodes(ray, least=2, needs_gpus=True)
    one = {"island": 1}
    with found.asking():
        assert found.take_first() == 2 and found.take_first() == 2
        assert asked == [[one, one]], "once"
        ray.there |= {A: MARKED, B: MARKED}
        assert found.take_first() == 0
        asyncio.run(found.want(3))
        assert asked[1:] == [[one, one, one]]
    assert asked[2:] == [[]]


def test_no_more_become_islands_than_are_wanted_and_what_is_given_back_may_again(asked: list[Any]) -> None:
    ray = Ray({A: MARKED, B: MARKED})
    found = nodes(ray)
    assert found.take_first() == 0
    asyncio.run(found.want(1))
    found.given_back(1)
    assert asyncio.run(found.look()).come == []
    asyncio.run(found.want(2))
    (again,) = asyncio.run(found.look()).come
    assert (again.node_id, again.number) == (B, 2)


@pytest.mark.parametrize("most", [None, 2])
def test_where_there_is_nothing_to_choose_nothing_is_asked_for(asked: list[Any], most: int | None) -> None:
    found = nodes(Ray({A: MARKED, B: MARKED}), least=2, most=most)
    assert found.take_first() == 0 and found.growth is None and not asked
