"""Both ends in one process, in which none dies. Deaths and hangs are in test_transfer_faults.py."""

from __future__ import annotations

import socket
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
import torch

from alignedserve.protocol.handshake import DIGEST_BYTES, NONCE_BYTES, ClientHandshake, ServerHandshake
from alignedserve.transport import group, kv_receiver
from alignedserve.transport.channel import (
    Channel,
    HandshakeRequest,
    Identity,
    Joining,
    Opened,
    Pulled,
    encoded,
)
from alignedserve.transport.completions import Completions, TransferId
from alignedserve.transport.kv_receiver import KVReceiver
from alignedserve.transport.kv_sender import MAX_STRANGERS, KVSender
from alignedserve.transport.runs import TransferSpec
from alignedserve.transport.staging_buffer import StagingBuffer
from alignedserve.types import Epoch, InstanceId, RequestKey
from tests.transport.helpers import (
    AT_ONCE_S,
    Outcomes,
    block_ids,
    empty_blocks,
    equal_blocks,
    filled_blocks,
    identity,
    leaving_no_thread,
    until,
)

BLOCK_BYTES = 4096
PREFILL = InstanceId("prefill-0")
ONE, TWO, THREE = RequestKey(1), RequestKey(2), RequestKey(3)
SENDER_S_BLOCKS = {ONE: block_ids(3, 4, 9), TWO: block_ids(0), THREE: block_ids(11, 10)}


class Prefill:
    def __init__(self, transport: str, me: Identity | None = None) -> None:
        self.blocks = filled_blocks(12, BLOCK_BYTES, seed=1, transport=transport)
        self.completions, self.outcomes = Completions(), Outcomes()
        self.staging_buffer = StagingBuffer(Epoch(1), self.completions)
        for key, ids in SENDER_S_BLOCKS.items():
            self.staging_buffer.put(key, ids, self.outcomes.append)
        self.sender = KVSender(transport, [self.blocks], self.staging_buffer, me or identity("prefill-0"))

    def close(self) -> None:
        self.sender.close()
        self.staging_buffer.clear()
        self.completions.run()
        assert self.staging_buffer.num_being_pulled == len(self.staging_buffer) == 0


class Decode:
    def __init__(self, transport: str, me: Identity | None = None) -> None:
        self.blocks = empty_blocks(20, BLOCK_BYTES)
        self.completions, self.outcomes = Completions(), Outcomes()
        self.receiver = KVReceiver(transport, [self.blocks], me or identity("decode-0"), self.completions)

    def pull(self, prefill: Prefill, *specs: TransferSpec, timeout_s: float = 30.0) -> str | None:
        """Returns the outcome's error."""
        before = len(self.outcomes)
        self.receiver.pull(PREFILL, prefill.sender.address, specs, self.outcomes.append, timeout_s)
        assert self.completions.run(timeout_s=60) == 1
        return self.outcomes[before].error

    def close(self) -> None:
        self.receiver.close()


@pytest.fixture(params=["gloo", "ipc"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def prefill(transport: str) -> Iterator[Prefill]:
    with closing(Prefill(transport)) as prefill:
        yield prefill


@pytest.fixture
def decode(transport: str) -> Iterator[Decode]:
    with closing(Decode(transport)) as decode:
        yield decode


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    with leaving_no_thread():
        yield


def test_several_requests_arrive_in_one_transfer(prefill: Prefill, decode: Decode) -> None:
    specs = [(ONE, block_ids(0, 1, 2)), (THREE, block_ids(15, 7))]
    assert decode.pull(prefill, *specs) is None
    assert equal_blocks(decode.blocks, [0, 1, 2, 15, 7], prefill.blocks, [3, 4, 9, 11, 10])
    untouched = sorted(set(range(20)) - {0, 1, 2, 15, 7})
    assert not decode.blocks[untouched].view(torch.uint8).any()
    outcome = decode.outcomes.only
    assert (outcome.transfer, outcome.what, outcome.keys) == (TransferId(Epoch(1), 1), "pull", (ONE, THREE))
    assert outcome.num_bytes == 5 * BLOCK_BYTES and outcome.seconds > 0

    until(lambda: len(prefill.staging_buffer) == 1, 30)
    prefill.completions.run()
    assert [(outcome.keys, outcome.error) for outcome in prefill.outcomes] == [
        ((ONE,), None),
        ((THREE,), None),
    ]
    # the connection goes on
    assert decode.pull(prefill, (TWO, block_ids(4))) is None
    assert equal_blocks(decode.blocks, [4], prefill.blocks, [0])


def test_what_the_receiver_has_is_not_copied(prefill: Prefill, decode: Decode) -> None:
    specs = [(ONE, block_ids(-1, -1, 2)), (THREE, block_ids(-1, 7))]
    assert decode.pull(prefill, *specs) is None
    assert equal_blocks(decode.blocks, [2, 7], prefill.blocks, [9, 10])
    untouched = sorted(set(range(20)) - {2, 7})
    assert not decode.blocks[untouched].view(torch.uint8).any()
    assert decode.outcomes.only.num_bytes == 2 * BLOCK_BYTES
    # It may have everything. The sender lets go of the blocks all the same.
    assert decode.pull(prefill, (TWO, block_ids(-1))) is None
    assert not decode.blocks[untouched].view(torch.uint8).any()
    until(lambda: len(prefill.staging_buffer) == 0, 30)
    prefill.completions.run()
    assert [outcome.error for outcome in prefill.outcomes] == [None] * 3


def test_a_sender_that_cut_its_connections_sends_again_to_who_connects_again(
    prefill: Prefill, decode: Decode
) -> None:
    assert decode.pull(prefill, (ONE, block_ids(0, 1, 2))) is None
    prefill.sender.cut()
    until(lambda: decode.receiver.error(PREFILL), 30)
    assert decode.pull(prefill, (TWO, block_ids(4))) is None
    assert equal_blocks(decode.blocks, [4], prefill.blocks, [0])


def test_what_is_not_staged_is_denied_and_the_connection_goes_on(prefill: Prefill, decode: Decode) -> None:
    assert decode.pull(prefill, (RequestKey(99), block_ids(0))) == "request 99 is not staged"
    assert decode.pull(prefill, (ONE, block_ids(0, 1))) == "request 1: 3 blocks staged, 2 asked for"
    assert decode.receiver.error(PREFILL) is None
    assert decode.pull(prefill, (ONE, block_ids(0, 1, 2))) is None
    assert decode.pull(prefill, (ONE, block_ids(0, 1, 2))) == "request 1 is not staged"


@pytest.mark.parametrize(
    ("stranger", "why"),
    [
        (
            identity("decode-0", dtype="bfloat16"),
            "refused: dtype is 'float32' at prefill-0 and 'bfloat16' at decode-0",
        ),
        (identity("decode-0", tp="2"), "refused: tp is not given at prefill-0 and '2' at decode-0"),
        (identity("decode-0", token="guessed"), "it does not know this cluster's token"),
    ],
)
def test_who_does_not_match_is_refused_by_name(
    transport: str, prefill: Prefill, stranger: Identity, why: str
) -> None:
    with closing(Decode(transport, stranger)) as decode:
        error = decode.pull(prefill, (ONE, block_ids(0, 1, 2)))
    assert error == f"connection to prefill-0: {why}"
    assert prefill.staging_buffer.num_being_pulled == 0


def test_another_transport_is_refused_by_name(transport: str, prefill: Prefill) -> None:
    with closing(Decode("nccl")) as decode:
        error = decode.pull(prefill, (ONE, block_ids(0, 1, 2)))
    assert (
        error
        == f"connection to prefill-0: refused: link is '{transport}' at prefill-0 and 'nccl' at decode-0"
    )


def test_another_instance_under_the_address_is_refused(transport: str, decode: Decode) -> None:
    with closing(Prefill(transport, identity("prefill-1"))) as other:
        error = decode.pull(other, (ONE, block_ids(0, 1, 2)))
    assert error == "connection to prefill-0: refused: this is prefill-1"


def test_an_older_start_is_refused_and_a_newer_one_cuts_it_off(transport: str, prefill: Prefill) -> None:
    with (
        closing(Decode(transport, identity("decode-0", epoch=4))) as old,
        closing(Decode(transport, identity("decode-0", epoch=5))) as new,
    ):
        assert old.pull(prefill, (ONE, block_ids(0, 1, 2))) is None
        assert new.pull(prefill, (TWO, block_ids(0))) is None
        until(lambda: old.receiver.error(PREFILL), 30)
        error = old.pull(prefill, (THREE, block_ids(0, 1)))
        assert error is not None
        assert "refused: decode-0 has started anew: epoch 4 is over, it is 5 now" in error
        assert new.pull(prefill, (THREE, block_ids(1, 2))) is None
        assert equal_blocks(new.blocks, [0, 1, 2], prefill.blocks, [0, 11, 10])


def test_several_decode_instances_pull_at_the_same_time(
    transport: str, prefill: Prefill, decode: Decode
) -> None:
    with closing(Decode(transport, identity("decode-1"))) as other:
        for end, key, targets in ((decode, ONE, (0, 1, 2)), (other, THREE, (3, 4))):
            specs = [(key, block_ids(*targets))]
            end.receiver.pull(PREFILL, prefill.sender.address, specs, end.outcomes.append)
        assert decode.completions.run(60) == other.completions.run(60) == 1
        assert decode.outcomes.errors == other.outcomes.errors == [None]
        assert equal_blocks(decode.blocks, [0, 1, 2], prefill.blocks, [3, 4, 9])
        assert equal_blocks(other.blocks, [3, 4], prefill.blocks, [11, 10])


def test_nobody_there(transport: str, decode: Decode) -> None:
    with closing(Prefill(transport)) as gone:
        pass
    error = decode.pull(gone, (ONE, block_ids(0, 1, 2)))
    assert error is not None and "Connection refused" in error


def test_a_pull_past_its_deadline_does_not_begin(prefill: Prefill, decode: Decode) -> None:
    assert decode.pull(prefill, (TWO, block_ids(3))) is None
    late = decode.pull(prefill, (ONE, block_ids(0, 1, 2)), timeout_s=0.0)
    assert late == "its deadline passed before it could begin"
    assert decode.receiver.error(PREFILL) is None
    assert decode.pull(prefill, (ONE, block_ids(0, 1, 2))) is None


def test_a_connection_that_cannot_be_made_in_time_is_made_anew(prefill: Prefill, decode: Decode) -> None:
    specs = (ONE, block_ids(0, 1, 2))
    assert decode.pull(prefill, specs, timeout_s=0.0) == "connection to prefill-0: its deadline passed"
    assert decode.pull(prefill, specs) is None


@pytest.mark.parametrize("transport", ["gloo"])
def test_a_sender_that_hangs_before_it_joins_runs_into_the_deadline(
    decode: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The transfer's own deadline ends it. The general limit for a setup is longer than this test waits.
    monkeypatch.setattr(kv_receiver, "SETUP_TIMEOUT_S", 120.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        decode.receiver.pull(PREFILL, f"{host}:{port}", [(ONE, block_ids(0))], decode.outcomes.append, 5.0)
        sock, _ = listener.accept()
        with closing(Channel(sock)) as channel:
            soon = time.monotonic() + 30
            channel.shake(ServerHandshake("secret"), soon)
            assert isinstance(channel.receive(soon), HandshakeRequest)
            channel.send(Opened(), soon)
            assert isinstance(channel.receive(soon), Joining)
            assert decode.completions.run(timeout_s=60) == 1
    assert decode.outcomes.errors[-1] is not None and "connection to prefill-0" in decode.outcomes.errors[-1]


def test_closing_ends_what_has_not_begun(prefill: Prefill, decode: Decode) -> None:
    for _ in range(3):
        specs = [(ONE, block_ids(0, 1, 2))]
        decode.receiver.pull(PREFILL, prefill.sender.address, specs, decode.outcomes.append)
    decode.receiver.close()
    decode.completions.run()
    assert len(decode.outcomes) == 3
    assert decode.outcomes.errors[-1] is not None


def test_a_sender_that_closes_breaks_its_connections(transport: str, decode: Decode) -> None:
    with closing(Prefill(transport)) as prefill:
        assert decode.pull(prefill, (ONE, block_ids(0, 1, 2))) is None
    until(lambda: decode.receiver.error(PREFILL), AT_ONCE_S)
    error = decode.receiver.error(PREFILL)
    assert error is not None and "the other end is gone" in error


def test_whoever_sends_no_handshake_request_is_shown_out(prefill: Prefill) -> None:
    with closing(connected(prefill)) as channel:
        other = encoded(Pulled(TransferId(Epoch(1), 1)))
        channel.shake(ClientHandshake("secret", lambda: other), time.monotonic() + 30)
        assert channel.sock.recv(1) == b""


def test_who_does_not_know_the_token_learns_nothing_of_it_and_is_shown_out(prefill: Prefill) -> None:
    with closing(connected(prefill)) as channel:
        # it has nothing of ours decoded: the sender's proof, and no answer to a wrong one
        channel.sock.sendall(bytes(NONCE_BYTES) + bytes(2 * DIGEST_BYTES))
        heard = b""
        with suppress(ConnectionResetError):
            while piece := channel.sock.recv(1 << 16):
                heard += piece
        assert len(heard) == NONCE_BYTES + DIGEST_BYTES and b"secret" not in heard


def test_strangers_are_bounded_and_the_oldest_goes(prefill: Prefill, decode: Decode) -> None:
    with ExitStack() as open_ones:
        strangers = [open_ones.enter_context(closing(connected(prefill))) for _ in range(MAX_STRANGERS + 1)]
        assert strangers[0].sock.recv(1) == b""
        assert decode.pull(prefill, (ONE, block_ids(0, 1, 2))) is None


@pytest.mark.parametrize("transport", ["gloo"])
def test_who_listens_in_a_sender_s_place_hears_a_random_number_only(decode: Decode) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        decode.receiver.pull(PREFILL, f"{host}:{port}", [(ONE, block_ids(0))], decode.outcomes.append, 30)
        sock, _ = listener.accept()
        with sock:
            sock.settimeout(30)
            sock.sendall(bytes(NONCE_BYTES + DIGEST_BYTES))
            heard = b""
            while piece := sock.recv(1 << 16):
                heard += piece
        assert len(heard) == NONCE_BYTES
        assert decode.completions.run(timeout_s=30) == 1
    assert decode.outcomes.errors[-1] == "connection to prefill-0: it does not know this cluster's token"


def test_the_file_that_two_ends_meet_in_is_the_user_s_alone_and_goes_with_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = str(tmp_path / "link-")
    monkeypatch.setattr(group, "_STORE_PREFIX", prefix)
    with closing(Prefill("gloo")) as prefill, closing(Decode("gloo")) as decode:
        assert decode.pull(prefill, (ONE, block_ids(0, 1, 2))) is None
        (path,) = tmp_path.iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == []
    for other in (tmp_path / "else", Path(f"{prefix}{'0' * 31}/")):
        with pytest.raises(OSError, match="is no file for a process group"):
            group.open_store(other, 1.0)


def connected(prefill: Prefill) -> Channel:
    host, port = prefill.sender.address.split(":")
    sock = socket.create_connection((host, int(port)))
    sock.settimeout(30)
    return Channel(sock)


def test_blocks_that_do_not_exist_are_an_error_at_once(prefill: Prefill, decode: Decode) -> None:
    with pytest.raises(RuntimeError, match="block 20 of the KV cache, which has 20"):
        decode.pull(prefill, (TWO, block_ids(20)))


def test_it_listens_on_loopback_only(prefill: Prefill) -> None:
    assert prefill.sender.address.startswith("127.0.0.1:")
    assert prefill.sender._listener.getsockname()[0] == "127.0.0.1"
