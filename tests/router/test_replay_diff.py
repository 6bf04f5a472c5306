from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from alignedserve.protocol.messages import Evict, InstanceLimits, NewTokens, PrefillReport
from alignedserve.router.config import RouterConfig
from alignedserve.router.eventlog import MAGIC, EventLog, LogReader
from alignedserve.router.events import Event, Received, Send
from alignedserve.router.replay_diff import compare, format_divergence, format_value
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.sim.island import SimIsland
from alignedserve.types import Epoch, InstanceId, PoolBlockId, RequestKey
from tests.sim.islands import requests, small_island

CONFIG = RouterConfig(link="host")
SCHEDULING = SchedulingConfig(min_batch_requests=4)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a simulated island that is short of memory, whose decode instance dies once."""
    path = tmp_path_factory.mktemp("log") / "router.events"
    island = small_island()
    with path.open("wb") as file:
        record(island, EventLog(file, CONFIG, Epoch(1), SCHEDULING))
        island.submit(requests(20))
        island.start()
        island.run(2.0)
        island.decodes[0].kill()
        island.decodes[0].start()
        assert island.run_until_done(20, 100.0)
    return path


def record(island: SimIsland, log: EventLog) -> None:
    def observe(now: float, event: Event, sends: list[Send]) -> None:
        log.append(now, event)
        log.answered(sends)

    island.router.observers.append(observe)


def replay(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "alignedserve", "replay", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def with_orders(log: Path, tmp_path: Path, orders: list[Send], at: int) -> Path:
    """Instead of those of the event of that number."""
    path, reader = tmp_path / "copy.events", LogReader(log)
    with path.open("wb") as file:
        copy = EventLog(file, reader.header.config, reader.header.epoch, reader.header.scheduling)
        for number, step in enumerate(reader.steps(), 1):
            copy.append(step.now, step.event)
            copy.answered(orders if number == at else step.orders or [])
    return path


def test_a_log_replays_to_the_same_orders_in_another_process(log: Path) -> None:
    done = replay(log)
    num_events = sum(1 for _ in LogReader(log).steps())
    assert done.returncode == 0 and done.stdout == f"{num_events} events, the same orders\n"
    assert num_events > 300


def an_event_with_orders(log: Path) -> int:
    """Of an event amid the others that has orders."""
    steps = enumerate(LogReader(log).steps(), 1)
    return next(number for number, step in steps if number > 100 and step.orders)


def test_the_first_event_with_other_orders_is_shown_with_both(log: Path, tmp_path: Path) -> None:
    at = an_event_with_orders(log)
    wrong = [Send(InstanceId("decode-9"), Evict(RequestKey(3), [PoolBlockId(5)], 7))]
    done = replay(with_orders(log, tmp_path, wrong, at))
    assert done.returncode == 1
    first, event, *orders = done.stdout.splitlines()
    assert first == f"{at - 1} events, the same orders; then another: - then, + now"
    assert event.startswith(f"event {at}, at ")
    assert "  - decode-9: Evict(key=3, blocks=[5], num_saved=7)" in orders
    assert any(line.startswith("  + ") for line in orders)


def test_another_policy_orders_other_things(log: Path, tmp_path: Path) -> None:
    path, reader = tmp_path / "fcfs.events", LogReader(log)
    with path.open("wb") as file:
        copy = EventLog(file, CONFIG, reader.header.epoch, SchedulingConfig("fcfs"))
        for step in reader.steps():
            copy.append(step.now, step.event)
            copy.answered(step.orders or [])
    assert compare(path).divergence


def test_what_the_router_ended_with_is_the_last_event(log: Path, tmp_path: Path) -> None:
    reader, path = LogReader(log), tmp_path / "broken.events"
    with path.open("wb") as file:
        copy = EventLog(file, reader.header.config, reader.header.epoch, reader.header.scheduling)
        for step in reader.steps():
            copy.append(step.now, step.event)
            copy.answered(step.orders or [])
            match step.event:
                case Received(sender=sender, message=PrefillReport(news=[_, *_]) as report):
                    # tokens that come too early
                    wrong = msgspec.structs.replace(report, news=[NewTokens(RequestKey(1), 5, [7])])
                    copy.append(step.now, Received(sender, wrong))
                    break
    found = compare(path)
    assert found.divergence and isinstance(found.divergence.error, RuntimeError)
    lines = list(format_divergence(found.divergence))
    assert "news=[NewTokens(key=1, first=5, tokens=[7])]" in lines[0]
    assert lines[1].startswith("  + raises RuntimeError: prefill-0: request 1 has 1 tokens")
    assert lines[2:] == ["  the log ends with this event"]


def test_every_changed_byte_is_found(log: Path, tmp_path: Path) -> None:
    """But for one that makes the last record longer: that is a torn one."""
    whole, path = log.read_bytes()[:20_000], tmp_path / "damaged.events"
    for place in range(0, len(whole), 97):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        try:
            compared = compare(path)
        except ValueError as error:
            assert str(path) in str(error)
        else:
            assert compared.num_torn_bytes > len(whole) - place - 2000, place


@pytest.mark.parametrize("cut", [1, 100])
def test_a_torn_end_is_left_out_and_said(log: Path, tmp_path: Path, cut: int) -> None:
    path = tmp_path / "torn.events"
    path.write_bytes(log.read_bytes()[:-cut])
    done = replay(path)
    assert done.returncode == 0, done.stdout
    assert "the same orders" in done.stdout and "bytes are part of a record" in done.stdout


@pytest.mark.parametrize("content", [b"", b"\x00\x00\x00\x05hello", MAGIC, MAGIC + b"\x00" * 8])
def test_what_is_no_log_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "none.events"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=str(path)):
        compare(path)


def test_long_lists_are_shown_by_their_first_items() -> None:
    limit = InstanceLimits(num_blocks=3)
    assert format_value(limit) == "InstanceLimits(num_blocks=3)"
    assert format_value([*range(100)]) == "[0, 1, 2, 3, 4, 5, 6, 7, … 92 more]"
