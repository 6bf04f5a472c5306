from __future__ import annotations

import socket
import threading
import time

import msgspec
import pytest

from alignedserve.protocol.messages import Refused
from alignedserve.transport.channel import MAX_FRAME_BYTES, Channel, Denied, Frame, Pull, Pulled
from alignedserve.transport.completions import TransferId
from alignedserve.types import BlockId, Epoch, RequestKey

TRANSFER = TransferId(Epoch(2), 5)


def soon() -> float:
    return time.monotonic() + 30


@pytest.fixture
def ends() -> tuple[Channel, Channel]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return Channel(one), Channel(other)


def test_frames_arrive_whole_and_in_order(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    frames: list[Frame] = [
        Pull(TRANSFER, [RequestKey(2**63 - 1)], [[BlockId(i) for i in range(100_000)]], 1.5),
        Denied(TRANSFER, "request 4 is not staged"),
        Pulled(TRANSFER),
        Refused("no"),
    ]

    def send() -> None:
        for frame in frames:
            one.send(frame, soon())

    sender = threading.Thread(target=send)
    sender.start()
    assert [other.receive(soon()) for _ in frames] == frames
    sender.join()
    one.close()
    other.close()


def test_the_other_end_s_death_ends_the_wait(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    one.check_open()
    other.close()
    with pytest.raises(ConnectionError, match="gone"):
        one.receive()
    with pytest.raises(ConnectionError, match="gone"):
        one.check_open()
    one.close()


def test_a_frame_that_was_cut_off_is_no_frame(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    one.sock.sendall((10).to_bytes(4) + b"half")
    one.close()
    with pytest.raises(ConnectionError, match="gone"):
        other.receive(soon())
    other.close()


def test_a_deadline_ends_the_wait(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    with pytest.raises(TimeoutError):
        one.receive(time.monotonic() + 0.01)
    with pytest.raises(TimeoutError, match="its deadline passed"):
        one.receive(time.monotonic() - 1)
    other.send(Pulled(TRANSFER), soon())
    assert one.receive(soon()) == Pulled(TRANSFER)
    one.close()
    other.close()


def test_another_thread_can_end_the_wait(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    threading.Timer(0.01, one.shut).start()
    with pytest.raises(ConnectionError, match="gone"):
        one.receive()
    one.close()
    one.shut()
    other.close()


def test_what_is_not_a_frame_is_refused(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    one.sock.sendall((MAX_FRAME_BYTES + 1).to_bytes(4))
    with pytest.raises(ConnectionError, match=f"{MAX_FRAME_BYTES + 1} bytes"):
        other.receive(soon())
    one.sock.sendall((5).to_bytes(4) + b"hello")
    with pytest.raises(msgspec.MsgspecError):
        other.receive(soon())
    one.close()
    other.close()
