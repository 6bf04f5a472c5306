from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from alignedserve.engine.ranks.leader import RankLost
from alignedserve.instance.loop import Stop, Up, WorkerLoop
from alignedserve.protocol.messages import AnyMessage, Prefill
from tests.prefill_worker.rig import KEY, Rig, work


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
    loop = WorkerLoop(rig.worker, wake, lambda name: pytest.fail(name), say, ended.set)
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
    loop = WorkerLoop(
        rig.worker, threading.Event(), pytest.fail, lambda *messages: said.append(messages), ended.set
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
