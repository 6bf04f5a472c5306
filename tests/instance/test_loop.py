from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from alignedserve.engine.rank_leader import RankLost
from alignedserve.instance.adapters import AdapterLoader
from alignedserve.instance.loop import Down, Stop, Up, WorkerLoop, WorkerThread
from alignedserve.protocol.messages import (
    AdaptersSet,
    AnyMessage,
    NewTokens,
    Prefill,
    PrefillReport,
    SetAdapters,
    TakeRole,
    UsePool,
)
from tests.instance.test_adapters import A, SlowPlaces
from tests.prefill_worker.rig import KEY, Rig, work
from tests.router.script import DECODE, hello


@pytest.mark.parametrize("is_lost", [False, True])
def test_what_a_lost_rank_may_have_spoilt_is_not_said(
    tiny_model: Callable[[str], Path], is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tiny_model("llama-mha"))
    engine, computed, ended, wake = rig.worker.engine, threading.Event(), threading.Event(), threading.Event()
    said: list[AnyMessage] = []

    def confirm() -> None:
        if is_lost:
            raise RankLost("rank 1 has ended: -9")

    def say(connection: int, messages: list[AnyMessage]) -> None:
        said.extend(messages)
        computed.set()

    monkeypatch.setattr(engine, "confirm", confirm)
    loop = WorkerThread(WorkerLoop(rig.worker, lambda name: pytest.fail(name), say), wake, ended.set)
    loop.start()
    loop.post(Up(1))
    loop.post(Prefill([work([5] * 20, key=KEY)]))
    if is_lost:
        assert ended.wait(60) and isinstance(loop.error, RankLost) and not said
        rig.close()
    else:
        assert computed.wait(60) and said
        loop.post(Stop())
    loop.join()
    assert is_lost or loop.error is None


def test_a_rank_that_is_lost_ends_an_instance_that_has_nothing_to_do(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tiny_model("llama-mha"))
    looked, is_lost, ended = threading.Event(), threading.Event(), threading.Event()

    def confirm() -> None:
        looked.set()
        if is_lost.is_set():
            raise RankLost("rank 1 has ended: -9")

    monkeypatch.setattr(rig.worker.engine, "confirm", confirm)
    said: list[object] = []
    loop = WorkerThread(
        WorkerLoop(rig.worker, pytest.fail, lambda *messages: said.append(messages)),
        threading.Event(),
        ended.set,
    )
    loop.start()
    try:
        assert looked.wait(60) and not ended.is_set()
        is_lost.set()
        assert ended.wait(60) and isinstance(loop.error, RankLost) and not said
        rig.close()
    finally:
        loop.post(Stop())
        loop.join()


@pytest.mark.parametrize(("share", "is_shared"), [(0.0, True), (0.5, False), (1.0, True)])
def test_an_instance_shares_nothing_over_connections_if_wrong_kv_may_have_been_found_meanwhile(
    tiny_model: Callable[[str], Path], share: float, is_shared: bool
) -> None:
    rig = Rig(tiny_model("llama-mha"), enable_prefix_caching=True, verify_blocks=share)
    said = list[AnyMessage]()
    loop = WorkerLoop(rig.worker, pytest.fail, lambda connection, messages: said.extend(messages))
    for connection in (1, 2):
        loop.post(Up(connection))
        loop.post(Prefill([work([5] * 40, key=KEY)]))
        said.clear()
        while not news_in(said):
            loop.finish(loop.begin())
    (news,) = news_in(said)
    assert news.num_reused == (32 if is_shared else 0)
    loop.post(Stop())
    assert loop.begin() is None


def news_in(said: list[AnyMessage]) -> list[NewTokens]:
    return [each for report in said if isinstance(report, PrefillReport) for each in report.news]


class Mapped:
    """A segment whose blocks nobody may look at."""

    is_closed = False

    @property
    def blocks(self) -> NDArray[np.uint8]:
        pytest.fail("it is used")

    checksums = blocks

    def close(self) -> None:
        self.is_closed = True


def test_orders_of_a_router_that_was_gone_when_the_pool_was_mapped_are_void(
    tiny_model: Callable[[str], Path],
) -> None:
    """It may have looked who has the pool mapped before this instance had."""
    rig = Rig(tiny_model("llama-mha"))
    mapped, is_over, dropped, said = Mapped(), threading.Event(), threading.Event(), list[AnyMessage]()

    def attach(name: str) -> Mapped:
        is_over.set()
        return mapped

    orders = WorkerLoop(
        rig.worker,
        attach,
        lambda connection, messages: said.extend(messages),
        is_over=is_over.is_set,
    )
    loop = WorkerThread(orders, threading.Event(), lambda: None)
    for each in (Up(1), UsePool("segment"), Prefill([work([5] * 20, key=KEY)]), Down(dropped.set)):
        loop.post(each)
    loop.start()
    assert dropped.wait(60) and mapped.is_closed
    loop.post(Stop())
    loop.join()
    assert loop.error is None
    assert not any(each.num_computed or each.num_asked for each in said if isinstance(each, PrefillReport))


def test_an_instance_of_another_role_has_its_adapters_before_it_does_anything(
    tiny_model: Callable[[str], Path],
) -> None:
    """The router takes the change for a death, so it no longer waits for an adapter that is being loaded."""
    before, after = Rig(tiny_model("llama-mha")), Rig(tiny_model("llama-mha"))
    places, said, introduced = SlowPlaces(), list[AnyMessage](), hello(DECODE)
    loop = WorkerLoop(
        before.worker,
        pytest.fail,
        lambda connection, messages: said.extend(messages),
        take_role=lambda role: (after.worker, introduced),
        adapters=AdapterLoader(places, lambda: None),
    )
    for each in (Up(1), SetAdapters(1, []), SetAdapters(2, [A])):
        loop.post(each)
    loop.finish(loop.begin())
    assert AdaptersSet(1) in said and AdaptersSet(2) not in said
    said.clear()
    loop.post(TakeRole("decode"))
    loop.post(SetAdapters(2, [A]))
    writing = threading.Timer(0.2, places.may_write.set)
    writing.start()
    loop.begin()
    assert said[:2] == [introduced, AdaptersSet(2)]
    writing.join()
    loop.post(Stop())
    assert loop.begin() is None
