"""Orders to load adapters, over places that load when the test lets them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from alignedserve.instance.adapters import AdapterLoader
from alignedserve.protocol.messages import AdapterAt, AdaptersSet, AnyMessage, SetAdapters
from alignedserve.types import InvalidRequest

A, B, C = (AdapterAt(name, f"/adapters/{name}") for name in "abc")


class SlowPlaces:
    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.may_write = threading.Event()
        self.wrong: str | None = None
        self.error: type[Exception] = InvalidRequest
        self.num_written = 0

    def write(self, name: str, directory: Path) -> int:
        assert self.may_write.wait(60)
        if self.wrong == name:
            raise self.error(f"{directory} is wrong")
        self.num_written += 1
        return self.num_written

    def set(self, name: str, number: int) -> None:
        self.numbers[name] = number

    def remove(self, name: str) -> None:
        del self.numbers[name]


class Rig:
    def __init__(self) -> None:
        self.places = SlowPlaces()
        self.woken = threading.Event()
        self.loader = AdapterLoader(self.places, self.woken.set)

    def first(self, *adapters: AdapterAt) -> list[AnyMessage]:
        """The order of a new connection."""
        self.places.may_write.set()
        self.loader.connected()
        answers = self.loader.take(SetAdapters(1, list(adapters)))
        self.places.may_write.clear()
        self.woken.clear()
        return answers

    def written(self) -> list[AnyMessage]:
        self.places.may_write.set()
        assert self.woken.wait(60)
        self.woken.clear()
        return self.loader.go_on()

    def close(self) -> None:
        self.places.may_write.set()
        self.loader.close()


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_the_first_order_of_a_connection_is_obeyed_at_once(rig: Rig) -> None:
    assert rig.first(A, B) == [AdaptersSet(1)]
    assert [*rig.places.numbers] == ["a", "b"]
    # They are still there after the router was lost.
    assert rig.first(B) == [AdaptersSet(1)]
    assert [*rig.places.numbers] == ["b"] and rig.places.num_written == 2
    rig.close()


def test_later_orders_are_obeyed_beside_iterations(rig: Rig) -> None:
    assert rig.first(A) == [AdaptersSet(1)]
    assert rig.loader.take(SetAdapters(2, [A, B])) == rig.loader.go_on() == []
    assert [*rig.places.numbers] == ["a"]
    assert rig.written() == [AdaptersSet(2)]
    assert [*rig.places.numbers] == ["a", "b"]
    assert rig.loader.take(SetAdapters(3, [B])) == [AdaptersSet(3)]
    assert [*rig.places.numbers] == ["b"] and rig.loader.go_on() == []
    rig.close()


def test_an_order_waits_for_what_is_being_written(rig: Rig) -> None:
    rig.first()
    rig.loader.take(SetAdapters(2, [A]))
    assert rig.loader.take(SetAdapters(3, [B])) == rig.loader.take(SetAdapters(4, [C])) == []
    # What nobody wants any more is dropped, and only the latest order is answered.
    assert rig.written() == [] and not rig.places.numbers
    assert rig.written() == [AdaptersSet(4)]
    assert [*rig.places.numbers] == ["c"]
    rig.close()


def test_a_failure_is_told_and_changes_nothing(rig: Rig) -> None:
    rig.first(A)
    rig.places.wrong = "b"
    rig.loader.take(SetAdapters(2, [A, B]))
    assert rig.written() == [AdaptersSet(2, "/adapters/b is wrong")]
    assert [*rig.places.numbers] == ["a"]
    assert rig.loader.take(SetAdapters(3, [A])) == [AdaptersSet(3)]
    # An instance that lacks an adapter of the system must not serve.
    with pytest.raises(RuntimeError, match="/adapters/b is wrong"):
        rig.first(A, B)
    rig.close()


def test_an_adapter_without_memory_ends_no_instance(rig: Rig) -> None:
    rig.first(A)
    rig.places.wrong, rig.places.error = "b", MemoryError
    rig.loader.take(SetAdapters(2, [A, B]))
    assert rig.written() == [AdaptersSet(2, "MemoryError: /adapters/b is wrong")]
    assert rig.loader.take(SetAdapters(3, [A])) == [AdaptersSet(3)]
    rig.close()


def test_a_new_connection_waits_for_what_the_last_one_began(rig: Rig) -> None:
    rig.first(A)
    rig.loader.take(SetAdapters(2, [A, B]))
    assert rig.first(A, C) == [AdaptersSet(1)]
    assert [*rig.places.numbers] == ["a", "c"]
    rig.close()
