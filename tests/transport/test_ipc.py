"""What is the matter of `ipc` alone: memory that is mapped, and holds that end while it is read."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from alignedserve.protocol.handshake import ClientHandshake, ServerHandshake
from alignedserve.transport import shared_memory
from alignedserve.transport.channel import (
    IPC_HANDLE_BYTES,
    Channel,
    DeviceMemory,
    Frame,
    Granted,
    HandshakeRequest,
    HostMemory,
    Opened,
    Pull,
    Pulled,
    Released,
    encoded,
)
from alignedserve.transport.completions import Completions, TransferId
from alignedserve.transport.kv_receiver import KVReceiver
from alignedserve.transport.kv_sender import KVSender
from alignedserve.transport.runs import Run
from alignedserve.transport.staging_buffer import StagingBuffer
from alignedserve.types import BlockId, Epoch, InstanceId, RequestKey
from tests.transport.helpers import (
    Outcomes,
    block_ids,
    bytes_of,
    empty_blocks,
    equal_blocks,
    filled_blocks,
    identity,
    leaving_no_thread,
    until,
)
from tests.transport.peers import SEED, Order, Peer, Staged, pull

BLOCK_BYTES, MIB = 4096, 1 << 20
PREFILL = InstanceId("prefill-0")
KEY, LONG = RequestKey(1), RequestKey(2)
CPU = torch.device("cpu")
NOBODY = 65534


def soon() -> float:
    return time.monotonic() + 30


# ---- memory ----


def test_it_is_as_torch_empty_makes_it_and_others_see_what_is_written() -> None:
    named = os.listdir("/dev/shm")
    blocks = shared_memory.empty((5, 3, 7), dtype=torch.bfloat16, device=CPU)
    assert os.listdir("/dev/shm") == named
    like = torch.empty((5, 3, 7), dtype=torch.bfloat16)
    assert (blocks.shape, blocks.stride(), blocks.dtype) == (like.shape, like.stride(), like.dtype)
    theirs = shared_memory.attach(shared_memory.describe(blocks))
    blocks.fill_(1.5)
    assert theirs.tobytes() == like.fill_(1.5).view(torch.uint8).numpy().tobytes()
    with pytest.raises(ValueError, match="read-only"):
        theirs[0] = 1


def test_its_size_is_fixed_and_no_program_that_is_started_inherits_it() -> None:
    blocks = shared_memory.empty((2, 8), dtype=torch.uint8, device=CPU)
    memory = shared_memory.describe(blocks)
    assert not os.get_inheritable(memory.fd)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fd, 8)


def test_memory_goes_with_its_last_user() -> None:
    blocks = shared_memory.empty((1 << 20,), dtype=torch.uint8, device=CPU)
    memory = shared_memory.describe(blocks)
    theirs = shared_memory.attach(memory)
    del blocks
    assert theirs.nbytes == 1 << 20
    with pytest.raises(OSError, match=f"can't be opened: .*/proc/{memory.pid}/fd/{memory.fd}"):
        shared_memory.attach(memory)


def attach_as_nobody(pipe: Connection, memory: HostMemory) -> None:
    os.setuid(NOBODY)
    try:
        shared_memory.attach(memory)
    except OSError as error:
        pipe.send(str(error))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become someone else")
def test_another_user_cannot_map_it() -> None:
    blocks = shared_memory.empty((16,), dtype=torch.uint8, device=CPU)
    with Peer(attach_as_nobody, shared_memory.describe(blocks)) as peer:
        assert "can't be opened: [Errno 13] Permission denied" in peer.receive()


def test_memory_of_one_process_alone_cannot_be_sent() -> None:
    staging_buffer = StagingBuffer(Epoch(1), Completions())
    for blocks in (
        filled_blocks(4, BLOCK_BYTES, SEED),
        filled_blocks(4, BLOCK_BYTES, SEED, "ipc")[1:],
    ):
        with leaving_no_thread(), pytest.raises(RuntimeError, match="private memory"):
            KVSender("ipc", [blocks], staging_buffer, identity("prefill-0"))


# ---- a real receiver, a scripted sender ----


class Receiver:
    def __init__(self) -> None:
        self.blocks = empty_blocks(8, BLOCK_BYTES)
        self.completions, self.outcomes = Completions(), Outcomes()
        self.kv_receiver = KVReceiver("ipc", [self.blocks], identity("decode-0"), self.completions)

    def start(self, address: str) -> None:
        self.kv_receiver.pull(PREFILL, address, [(KEY, block_ids(0, 1, 2))], self.outcomes.append, 30.0)

    def outcome(self) -> str | None:
        assert self.completions.run(timeout_s=30) == 1
        return self.outcomes.only.error

    def close(self) -> None:
        self.kv_receiver.close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with closing(Receiver()) as receiver:
        yield receiver


@pytest.fixture
def staged() -> torch.Tensor:
    return filled_blocks(8, BLOCK_BYTES, SEED, "ipc")


@contextmanager
def asked(receiver: Receiver, opened: Opened) -> Iterator[Channel]:
    """The sender's end, when it has let the receiver in."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        receiver.start(f"{host}:{port}")
        sock, _ = listener.accept()
    with closing(Channel(sock)) as channel:
        channel.shake(ServerHandshake("secret"), soon())
        assert isinstance(channel.receive(soon()), HandshakeRequest)
        channel.send(opened, soon())
        yield channel


def memory_of(blocks: torch.Tensor, **other: int) -> HostMemory:
    memory = shared_memory.describe(blocks)
    return HostMemory(**{name: getattr(memory, name) for name in memory.__struct_fields__} | other)


@contextmanager
def pulling(
    receiver: Receiver, blocks: torch.Tensor, runs: list[Run]
) -> Iterator[tuple[Channel, TransferId]]:
    """The sender's end, when it has granted these."""
    with asked(receiver, Opened((shared_memory.describe(blocks),))) as channel:
        order = channel.receive(soon())
        assert isinstance(order, Pull)
        channel.send(Granted(order.transfer, runs), soon())
        yield channel, order.transfer


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"fd": 1 << 20}, "the sender's memory can't be opened: [Errno 2] No such file or directory"),
        ({"inode": 1}, "the sender's memory is not at /proc/"),
        ({"num_bytes": 9 * BLOCK_BYTES}, "the sender's memory is not at /proc/"),
        ({"num_bytes": 8 * BLOCK_BYTES - 1}, f"the sender has 32767 bytes, in blocks of {BLOCK_BYTES}"),
    ],
)
def test_memory_that_is_not_there_breaks_the_connection(
    receiver: Receiver, staged: torch.Tensor, other: dict[str, int], why: str
) -> None:
    with asked(receiver, Opened((memory_of(staged, **other),))):
        error = receiver.outcome()
    assert error is not None and why in error and error.startswith("connection to prefill-0: ")
    assert not receiver.blocks.view(torch.uint8).any()


@pytest.mark.parametrize(
    ("memories", "why"),
    [
        ((), "the sender has the memories of 0 ranks, those to fill are of 1"),
        ((DeviceMemory(bytes(IPC_HANDLE_BYTES), 0, BLOCK_BYTES),), "the sender's blocks are in DeviceMemory"),
    ],
)
def test_memory_of_another_kind_breaks_the_connection(
    receiver: Receiver, memories: tuple[DeviceMemory, ...], why: str
) -> None:
    with asked(receiver, Opened(memories)):
        error = receiver.outcome()
    assert error is not None and why in error


@pytest.mark.parametrize(
    ("runs", "why"),
    [
        ([Run(0, 6, 3)], "block 8 of the sender's KV cache, which has 8"),
        ([Run(0, -1, 3)], "block -1 of the sender's KV cache, which has 8"),
        ([Run(0, 0, 2), Run(3, 4, 1)], "3 blocks were asked for, 3 others were granted"),
        ([Run(0, 0, 3), Run(0, 3, -1)], "3 blocks were asked for, 3 others were granted"),
    ],
)
def test_blocks_that_nobody_has_or_asked_for_are_not_read(
    receiver: Receiver, staged: torch.Tensor, runs: list[Run], why: str
) -> None:
    with pulling(receiver, staged, runs) as (channel, _):
        error = receiver.outcome()
        with pytest.raises(ConnectionError, match="gone"):
            channel.receive(soon())
    assert error is not None and why in error
    assert not receiver.blocks.view(torch.uint8).any()


def test_blocks_are_pulled_only_when_the_sender_says_that_they_were_held(
    receiver: Receiver, staged: torch.Tensor
) -> None:
    with pulling(receiver, staged, [Run(0, 5, 3)]) as (channel, transfer):
        assert channel.receive(soon()) == Pulled(transfer)
        # all bytes are there, and yet
        assert equal_blocks(receiver.blocks, [0, 1, 2], staged, [5, 6, 7])
        assert receiver.completions.run() == 0
        channel.send(Released(transfer), soon())
        assert receiver.outcome() is None


@pytest.mark.parametrize("answer", [None, Released(TransferId(Epoch(1), 9)), Opened()])
def test_without_that_word_the_pull_has_failed(
    receiver: Receiver, staged: torch.Tensor, answer: Frame | None
) -> None:
    with pulling(receiver, staged, [Run(0, 5, 3)]) as (channel, transfer):
        assert channel.receive(soon()) == Pulled(transfer)
        if answer is not None:
            channel.send(answer, soon())
    assert receiver.outcome() is not None


# ---- a real sender, a receiver that is scripted or stopped ----


class Prefill:
    def __init__(self, blocks: torch.Tensor, requests: dict[RequestKey, list[BlockId]]) -> None:
        self.blocks = blocks
        self.completions, self.outcomes = Completions(), Outcomes()
        self.staging_buffer = StagingBuffer(Epoch(1), self.completions)
        for key, ids in requests.items():
            self.staging_buffer.put(key, ids, self.outcomes.append)
        self.sender = KVSender("ipc", [blocks], self.staging_buffer, identity("prefill-0"))

    def close(self) -> None:
        self.sender.close()


@contextmanager
def granted(prefill: Prefill, timeout_s: float) -> Iterator[tuple[Channel, TransferId]]:
    """The receiver's end, when it may copy."""
    host, port = prefill.sender.address.split(":")
    me, transfer = identity("decode-0"), TransferId(Epoch(1), 1)
    with closing(Channel(socket.create_connection((host, int(port))))) as channel:
        fingerprint = {**me.fingerprint, "link": "ipc"}
        request = encoded(HandshakeRequest(PREFILL, me.instance_id, me.epoch, fingerprint))
        channel.shake(ClientHandshake(me.token, lambda: request), soon())
        opened = channel.receive(soon())
        assert isinstance(opened, Opened) and opened.memories == (shared_memory.describe(prefill.blocks),)
        channel.send(Pull(transfer, [KEY], [block_ids(0, 1, 2)], timeout_s), soon())
        assert channel.receive(soon()) == Granted(transfer, [Run(0, 5, 3)])
        yield channel, transfer


def test_who_has_pulled_is_told_that_it_was_in_time(staged: torch.Tensor) -> None:
    with closing(Prefill(staged, {KEY: block_ids(5, 6, 7)})) as prefill:
        with granted(prefill, timeout_s=30) as (channel, transfer):
            assert prefill.staging_buffer.num_being_pulled == 1
            channel.send(Pulled(transfer), soon())
            assert channel.receive(soon()) == Released(transfer)
        until(lambda: not len(prefill.staging_buffer), 30)
        prefill.completions.run()
        assert prefill.outcomes.errors == [None]


def test_blocks_are_there_as_long_as_they_can_be_pulled(receiver: Receiver) -> None:
    completions, outcomes = Completions(), Outcomes()
    staging_buffer = StagingBuffer(Epoch(1), completions)
    staging_buffer.put(KEY, block_ids(5, 6, 7), outcomes.append)
    with closing(
        KVSender("ipc", [filled_blocks(8, BLOCK_BYTES, SEED, "ipc")], staging_buffer, identity("prefill-0"))
    ) as sender:
        receiver.start(sender.address)
        assert receiver.outcome() is None
    assert equal_blocks(receiver.blocks, [0, 1, 2], filled_blocks(8, BLOCK_BYTES, SEED), [5, 6, 7])


@pytest.mark.parametrize("end", ["cut", "close", "deadline", "withdrawn, deadline"])
def test_who_has_pulled_too_late_is_not_told_that_it_was_in_time(staged: torch.Tensor, end: str) -> None:
    with closing(Prefill(staged, {KEY: block_ids(5, 6, 7)})) as prefill:
        with granted(prefill, timeout_s=0.2 if "deadline" in end else 30) as (channel, transfer):
            if "withdrawn" in end:
                prefill.staging_buffer.withdraw(KEY)
            elif end != "deadline":
                getattr(prefill.sender, end)()
            until(lambda: prefill.staging_buffer.num_being_pulled == 0, 30)
            with pytest.raises(OSError):
                channel.send(Pulled(transfer), soon())
                channel.receive(soon())
        prefill.completions.run()
        assert prefill.outcomes.errors == (["withdrawn"] if "withdrawn" in end else [])
        assert len(prefill.staging_buffer) == (0 if "withdrawn" in end else 1)


def test_a_pull_that_is_cut_under_a_copy_is_no_pull() -> None:
    """The blocks are others' by the time that the receiver wakes up."""
    last = BlockId(32)
    long = [BlockId(block) for block in range(32)] * 4000 + [last]
    prefill = Prefill(filled_blocks(33, MIB, SEED, "ipc"), {LONG: long, KEY: block_ids(3)})
    staged = Staged("ipc", 33, MIB)
    with closing(prefill), Peer(pull, "decode-0", 1, staged) as peer:
        arrived = shared_memory.attach(peer.receive()).reshape(33, MIB)
        peer.pipe.send(Order(prefill.sender.address, [(LONG, long)], long))
        until(lambda: arrived[0].any(), 30)
        peer.signal(signal.SIGSTOP)
        assert not arrived[last].any(), "it was over before it could be stopped"
        prefill.sender.cut()
        until(lambda: prefill.staging_buffer.num_being_pulled == 0, 20)
        bytes_of(prefill.blocks)[:] = 0
        peer.signal(signal.SIGCONT)
        error, _ = peer.receive()
        assert error is not None and "connection to prefill-0" in error
        # it has stopped: what it has got does not change any more
        before = arrived.copy()
        bytes_of(prefill.blocks)[:] = 7
        assert peer.ask(Order(prefill.sender.address, [(KEY, block_ids(32))], block_ids(3)))[0] is None
        assert (arrived[last] == 7).all() and (arrived[:last] == before[:last]).all()
        assert peer.end() == "closed"


def test_nothing_of_a_killed_sender_stays() -> None:
    """Its memory has no name, and goes with the connection."""

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:alignedserve-kv")

    before = mapped()
    with closing(Receiver()) as receiver, Peer(send_and_wait) as peer:
        receiver.start(peer.receive())
        assert receiver.outcome() is None and mapped() == before + 1
        peer.signal(signal.SIGKILL)
        until(lambda: receiver.kv_receiver.error(PREFILL), 20)
        until(lambda: mapped() == before, 20)
    assert equal_blocks(receiver.blocks, [0, 1, 2], filled_blocks(8, BLOCK_BYTES, SEED), [5, 6, 7])


def send_and_wait(pipe: Connection) -> None:
    prefill = Prefill(filled_blocks(8, BLOCK_BYTES, SEED, "ipc"), {KEY: block_ids(5, 6, 7)})
    pipe.send(prefill.sender.address)
    pipe.recv()
