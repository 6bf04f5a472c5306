from __future__ import annotations

import os
import stat
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from alignedserve.protocol.address import RouterAddress
from alignedserve.protocol.messages import Abort
from alignedserve.router.config import RouterConfig
from alignedserve.router.eventlog import EventLog, LogReader, replay
from alignedserve.router.events import Event, Send
from alignedserve.router.process import RouterProcess, RouterProcessConfig
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.types import Epoch
from tests.full_disk import files_of_at_most
from tests.router.script import DECODE, GATEWAY, ONE, Script


class Recorded(Script):
    """A script whose events are kept, with the orders that they led to."""

    def __init__(self) -> None:
        self.events: list[tuple[float, Event]] = []
        self.orders: list[list[Send]] = []
        super().__init__()

    def _decide(self, event: Event) -> list[Send]:
        self.events.append((self.now, event))
        sends = super()._decide(event)
        # what was sent must not change with the entries it came from
        self.orders.append(msgspec.msgpack.decode(msgspec.msgpack.encode(sends), type=list[Send]))
        return sends


def test_replay_gives_the_same_orders(tmp_path: Path) -> None:
    script = Recorded()
    script.running(1)
    script.pooled(2)
    script.tick(0.5)
    script.close(DECODE)
    script.connect(DECODE, epoch=2)
    script.say(GATEWAY, Abort([ONE]))

    path = tmp_path / "events"
    with path.open("wb") as file:
        log = EventLog(file, RouterConfig(link="host"), Epoch(7), SchedulingConfig())
        for (now, event), orders in zip(script.events, script.orders, strict=True):
            log.append(now, event)
            log.answered(orders)
    replayed = list(replay(path))
    assert [(now, event) for now, event, _ in replayed] == script.events
    assert [orders for _, _, orders in replayed] == script.orders
    assert any(script.orders)


def test_event_logs_are_the_user_s_alone(tmp_path: Path) -> None:
    """Prompts and answers are in them."""
    directory = tmp_path / "made" / "events"
    config = RouterProcessConfig(
        RouterAddress("", 0, ""), RouterConfig(link="host"), event_log=str(directory)
    )
    before = os.umask(0)
    try:
        with ExitStack() as files:
            assert RouterProcess(config)._event_log(Epoch(7), files) is not None
            (path,) = directory.iterdir()
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700
            # what somebody has put there under the next one's name is not written to
            (directory / "router-8.events").symlink_to(tmp_path / "his")
            with pytest.raises(FileExistsError):
                RouterProcess(config)._event_log(Epoch(8), files)
            directory.chmod(0o777)
            with pytest.raises(OSError, match="other users of this machine can write in it"):
                RouterProcess(config)._event_log(Epoch(9), files)
    finally:
        os.umask(before)
    assert not (tmp_path / "his").exists()


def test_a_torn_record_ends_the_log(tmp_path: Path) -> None:
    script = Recorded()
    script.submit()
    path = tmp_path / "events"
    with path.open("wb") as file:
        log = EventLog(file, RouterConfig(link="host"), Epoch(7), SchedulingConfig())
        for (now, event), orders in zip(script.events, script.orders, strict=True):
            log.append(now, event)
            log.answered(orders)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    # its last event is there, and its orders are not
    assert len(list(replay(path))) == len(script.events)
    reader = LogReader(path)
    assert [step.orders for step in reader.steps()] == [*script.orders[:-1], None]
    assert reader.num_torn_bytes > 0
    last_orders = 8 + len(msgspec.msgpack.encode(script.orders[-1]))
    path.write_bytes(whole[: -last_orders - 1])
    assert len(list(replay(path))) == len(script.events) - 1


def test_on_a_full_disk_the_log_ends_and_the_router_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = Recorded()
    script.running(1)
    script.tick(0.5)
    path = tmp_path / "events"
    with path.open("wb", buffering=0) as file:
        log = EventLog(file, RouterConfig(link="host"), Epoch(7), SchedulingConfig())
        with files_of_at_most(path.stat().st_size + 500):
            for (now, event), orders in zip(script.events, script.orders, strict=True):
                log.append(now, event)
                log.answered(orders)
        # There is room again: what is missing in between must not be taken for the same sequence.
        log.append(1.0, script.events[0][1])
    assert caplog.messages == ["the event log ends here: File too large"]
    replayed = list(replay(path))
    assert 0 < len(replayed) < len(script.events)
    assert [(now, event) for now, event, _ in replayed] == script.events[: len(replayed)]
