"""Real processes that are killed or stopped while blocks are on their way."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from alignedserve.transport.completions import Completions
from alignedserve.transport.kv_receiver import KVReceiver
from alignedserve.transport.kv_sender import KVSender
from alignedserve.transport.runs import TransferSpec
from alignedserve.transport.staging_buffer import StagingBuffer
from alignedserve.types import BlockId, InstanceId, RequestKey
from tests.transport.helpers import (
    AT_ONCE_S,
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
from tests.transport.peers import SEED, Order, Peer, Staged, pull, run_sender

BLOCK_BYTES = 4 << 20
# much more than sockets hold
NUM_BLOCKS = 16
BIG, SMALL, LONG = RequestKey(1), RequestKey(2), RequestKey(3)
ALL = [BlockId(block) for block in range(NUM_BLOCKS)]
SMALL_S_BLOCKS = block_ids(NUM_BLOCKS + 1, NUM_BLOCKS)
LAST = BlockId(NUM_BLOCKS + 2)
# the same blocks again and again, and then one more: for seconds, so that no test finds it over
AGAIN_AND_AGAIN = {"gloo": [*ALL * 240, LAST], "ipc": [*ALL * 4800, LAST]}
STAGED = {
    transport: Staged(
        transport,
        NUM_BLOCKS + 3,
        BLOCK_BYTES,
        {BIG: ALL, SMALL: SMALL_S_BLOCKS, LONG: long},
    )
    for transport, long in AGAIN_AND_AGAIN.items()
}
BIG_SPECS: list[TransferSpec] = [(BIG, ALL)]
LONG_SPECS: dict[str, list[TransferSpec]] = {
    transport: [(LONG, long)] for transport, long in AGAIN_AND_AGAIN.items()
}
SMALL_SPECS: list[TransferSpec] = [(SMALL, block_ids(NUM_BLOCKS, NUM_BLOCKS + 1))]
PREFILL = InstanceId("prefill-0")
# Deadline in seconds of a transfer whose sender is stopped. The first bytes have to arrive before it. It is much
# less than the default.
HANG_S = 6.0


class Decode:
    def __init__(self, transport: str) -> None:
        self.blocks = empty_blocks(NUM_BLOCKS + 3, BLOCK_BYTES)
        self.bytes = bytes_of(self.blocks)
        self.completions, self.outcomes = Completions(), Outcomes()
        self.receiver = KVReceiver(transport, [self.blocks], identity("decode-0"), self.completions)

    def start(
        self, address: str, specs: list[TransferSpec], source: InstanceId = PREFILL, timeout_s: float = 30.0
    ) -> None:
        self.receiver.pull(source, address, specs, self.outcomes.append, timeout_s)

    def pull(
        self, address: str, specs: list[TransferSpec], source: InstanceId = PREFILL, timeout_s: float = 30.0
    ) -> None:
        self.start(address, specs, source, timeout_s)
        assert self.completions.run(timeout_s=60) == 1

    def stop_in_mid_transfer(self, peer: Peer) -> None:
        until(lambda: self.bytes[0].any(), 30)
        peer.signal(signal.SIGSTOP)
        assert not self.bytes[LAST].any(), "it was over before it could be stopped"

    def close(self) -> None:
        self.receiver.close()


# Each test has one of them in a run, and not all have the same.
@pytest.fixture(params=[pytest.param(each, marks=pytest.mark.drawn(one_in=2)) for each in ("gloo", "ipc")])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def decode(transport: str) -> Iterator[Decode]:
    before = num_mappings()
    with leaving_no_thread(), closing(Decode(transport)) as decode:
        yield decode
    assert num_mappings() <= before


def num_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:alignedserve-kv")


def test_bytes_arrive_from_another_process(transport: str, decode: Decode) -> None:
    with Peer(run_sender, "prefill-0", 1, STAGED[transport]) as peer:
        decode.pull(peer.receive(), BIG_SPECS + SMALL_SPECS)
        assert decode.outcomes.errors == [None]
        until(lambda: peer.ask("how many?") == (1, 0), 30)
        assert peer.end() == [((BIG,), None), ((SMALL,), None), ((LONG,), "withdrawn")]
    expected = filled_blocks(NUM_BLOCKS + 3, BLOCK_BYTES, SEED)
    assert equal_blocks(decode.blocks, [*ALL, NUM_BLOCKS, NUM_BLOCKS + 1], expected, [*ALL, *SMALL_S_BLOCKS])


def test_a_sender_killed_in_mid_transfer_breaks_its_connection_and_no_other(
    transport: str, decode: Decode
) -> None:
    other_one = InstanceId("prefill-1")
    with (
        Peer(run_sender, "prefill-0", 1, STAGED[transport]) as peer,
        Peer(run_sender, "prefill-1", 1, STAGED[transport]) as other,
    ):
        address, other_address = peer.receive(), other.receive()
        decode.pull(other_address, SMALL_SPECS, other_one)
        decode.start(address, LONG_SPECS[transport])
        decode.stop_in_mid_transfer(peer)
        peer.signal(signal.SIGKILL)
        assert decode.completions.run(timeout_s=AT_ONCE_S) == 1
        assert decode.outcomes.errors[0] is None
        assert (
            decode.outcomes.errors[1] is not None and "connection to prefill-0" in decode.outcomes.errors[1]
        )
        assert not decode.bytes[LAST].any(), "it was noticed at the end only"
        assert decode.receiver.error(other_one) is None
        # the dead one's address, and then the one that was started in its place
        decode.pull(address, BIG_SPECS, timeout_s=5)
        assert decode.outcomes.errors[2] is not None and "Connection re" in decode.outcomes.errors[2]
        with Peer(run_sender, "prefill-0", 2, STAGED[transport]) as anew:
            decode.pull(anew.receive(), BIG_SPECS)
            decode.pull(other_address, BIG_SPECS, other_one)
        assert decode.outcomes.errors[3:] == [None, None]
    expected = filled_blocks(NUM_BLOCKS + 3, BLOCK_BYTES, SEED)
    assert equal_blocks(decode.blocks, ALL, expected, ALL)


def test_closing_in_mid_transfer_does_not_wait_for_its_end(transport: str, decode: Decode) -> None:
    with Peer(run_sender, "prefill-0", 1, STAGED[transport]) as peer:
        decode.start(peer.receive(), LONG_SPECS[transport])
        until(lambda: decode.bytes[0].any(), 30)
        decode.receiver.close()
        assert not decode.bytes[LAST].any(), "it was over before it could be closed"
        assert decode.completions.run() == 1
        assert decode.outcomes.errors == ["connection to prefill-0: closed"]
        until(lambda: peer.ask("how many?") == (3, 0), AT_ONCE_S)
        assert peer.end() == [((key,), "withdrawn") for key in (BIG, SMALL, LONG)]


def test_an_idle_connection_breaks_when_its_sender_is_killed(transport: str, decode: Decode) -> None:
    with Peer(run_sender, "prefill-0", 1, STAGED[transport]) as peer:
        decode.pull(peer.receive(), SMALL_SPECS)
        assert decode.receiver.error(PREFILL) is None
        peer.signal(signal.SIGKILL)
        until(lambda: decode.receiver.error(PREFILL), AT_ONCE_S)


def test_a_sender_that_hangs_runs_into_the_deadline(transport: str, decode: Decode) -> None:
    with Peer(run_sender, "prefill-0", 1, STAGED[transport]) as peer:
        address = peer.receive()
        decode.pull(address, SMALL_SPECS)
        begun_s = time.monotonic()
        decode.start(address, LONG_SPECS[transport], timeout_s=HANG_S)
        decode.stop_in_mid_transfer(peer)
        assert decode.completions.run(timeout_s=AT_ONCE_S) == 1
        # gloo counts whole milliseconds
        assert time.monotonic() - begun_s > HANG_S - 0.1
        assert (
            decode.outcomes.errors[1] is not None and "connection to prefill-0" in decode.outcomes.errors[1]
        )
        assert not decode.bytes[LAST].any(), "it was over before its deadline"
        arrived = decode.bytes.copy()
        # one that hangs before it has answered at all
        decode.pull(address, BIG_SPECS, timeout_s=0.3)
        assert decode.outcomes.errors[2] is not None
        # nothing of it comes later, and it serves again
        peer.signal(signal.SIGCONT)
        until(lambda: peer.ask("how many?") == (2, 0), 30)
        assert (decode.bytes == arrived).all()
        decode.pull(address, BIG_SPECS)
        assert decode.outcomes.errors[3] is None
        until(lambda: peer.ask("how many?") == (1, 0), 30)
        assert peer.end() == [((SMALL,), None), ((BIG,), None), ((LONG,), "withdrawn")]
    assert equal_blocks(decode.blocks, ALL, filled_blocks(NUM_BLOCKS + 3, BLOCK_BYTES, SEED), ALL)


class Prefill:
    def __init__(self, transport: str) -> None:
        self.blocks = filled_blocks(NUM_BLOCKS + 3, BLOCK_BYTES, SEED, transport)
        self.completions, self.outcomes = Completions(), Outcomes()
        me = identity("prefill-0")
        self.staging_buffer = StagingBuffer(me.epoch, self.completions)
        for key, ids in STAGED[transport].requests.items():
            self.staging_buffer.put(key, ids, self.outcomes.append)
        self.sender = KVSender(transport, [self.blocks], self.staging_buffer, me)

    def stop_in_mid_transfer(self, peer: Peer) -> None:
        until(lambda: self.staging_buffer.num_being_pulled, 30)
        peer.signal(signal.SIGSTOP)
        assert not self.completions.run()

    def close(self) -> None:
        self.sender.close()


@pytest.fixture
def prefill(transport: str) -> Iterator[Prefill]:
    with leaving_no_thread(), closing(Prefill(transport)) as prefill:
        yield prefill


def test_a_sender_closes_in_mid_transfer(transport: str, prefill: Prefill) -> None:
    with receiver(transport, epoch=1) as peer:
        peer.receive()
        peer.pipe.send(Order(prefill.sender.address, LONG_SPECS[transport], AGAIN_AND_AGAIN[transport]))
        prefill.stop_in_mid_transfer(peer)
        prefill.sender.close()
        assert (len(prefill.staging_buffer), prefill.staging_buffer.num_being_pulled) == (3, 0)
        peer.signal(signal.SIGCONT)
        error, _ = peer.receive()
        assert error is not None and "connection to prefill-0" in error
        assert peer.end() == "closed"


def receiver(transport: str, epoch: int) -> Peer:
    return Peer(pull, "decode-0", epoch, STAGED[transport])


def test_what_a_killed_receiver_was_sent_can_be_pulled_by_its_successor(
    transport: str, prefill: Prefill
) -> None:
    long_one = Order(
        prefill.sender.address, LONG_SPECS[transport] + BIG_SPECS, AGAIN_AND_AGAIN[transport] + ALL
    )
    order = Order(prefill.sender.address, BIG_SPECS, ALL)
    with receiver(transport, epoch=1) as peer, receiver(transport, epoch=2) as successor:
        peer.receive()
        successor.receive()
        peer.pipe.send(long_one)
        prefill.stop_in_mid_transfer(peer)
        peer.signal(signal.SIGKILL)
        until(lambda: prefill.staging_buffer.num_being_pulled == 0, AT_ONCE_S)
        assert not prefill.completions.run() and len(prefill.staging_buffer) == 3
        assert successor.ask(order) == (None, True)
        assert successor.end() == "closed"
    until(lambda: len(prefill.staging_buffer) == 2, 30)
    prefill.completions.run()
    assert (prefill.outcomes.only.keys, prefill.outcomes.only.error) == ((BIG,), None)


def test_a_receiver_that_hangs_runs_into_the_deadline(transport: str, prefill: Prefill) -> None:
    with receiver(transport, epoch=1) as peer:
        peer.receive()
        # connecting counts too
        peer.pipe.send(
            Order(prefill.sender.address, LONG_SPECS[transport], AGAIN_AND_AGAIN[transport], timeout_s=5.0)
        )
        prefill.stop_in_mid_transfer(peer)
        prefill.staging_buffer.withdraw(LONG)
        assert not prefill.completions.run()
        until(lambda: prefill.staging_buffer.num_being_pulled == 0, AT_ONCE_S)
        prefill.completions.run()
        assert (prefill.outcomes.only.keys, prefill.outcomes.only.error) == ((LONG,), "withdrawn")
        peer.signal(signal.SIGCONT)
        error, _ = peer.receive()
        assert error is not None and "connection to prefill-0" in error
        assert peer.ask(Order(prefill.sender.address, SMALL_SPECS, SMALL_S_BLOCKS)) == (None, True)
        assert peer.end() == "closed"
    assert torch.equal(
        prefill.blocks.view(torch.uint8), filled_blocks(NUM_BLOCKS + 3, BLOCK_BYTES, SEED).view(torch.uint8)
    )
