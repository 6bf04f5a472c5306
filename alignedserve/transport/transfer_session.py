"""One connection of a sender: the handshake, then blocks for each pull, until either end disconnects.

It also ends at a deadline, and at the first message out of order. The requests of an unfinished pull can then be pulled
again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from alignedserve.protocol.handshake import ServerHandshake
from alignedserve.protocol.messages import Refused
from alignedserve.transport.channel import (
    Channel,
    Denied,
    Granted,
    HandshakeRequest,
    Identity,
    Pull,
    Pulled,
    Released,
)
from alignedserve.transport.data_path import SenderEnd
from alignedserve.transport.failures import CONNECTION_FAILURES, describe, unexpected
from alignedserve.transport.fingerprint import differences
from alignedserve.transport.group import SETUP_TIMEOUT_S
from alignedserve.transport.runs import HAS_BLOCK, merge
from alignedserve.transport.staging_buffer import NotStaged, StagingBuffer
from alignedserve.types import RequestKey


class TransferSession:
    def __init__(
        self,
        transport: str,
        end: SenderEnd,
        block_bytes: int,
        staging_buffer: StagingBuffer,
        me: Identity,
        channel: Channel,
        admit: Callable[[HandshakeRequest, Channel], str | None],
    ) -> None:
        self._transport = transport
        self._end = end
        self._block_bytes = block_bytes
        self._staging_buffer = staging_buffer
        self._me = me
        self._channel = channel
        self._admit = admit
        self._pulling: Sequence[RequestKey] = ()
        self.name = "connection to an unknown instance"

    def run(self) -> str:
        """Runs until the connection ends, and returns the reason."""
        try:
            self._open()
            while True:
                self._serve(self._next_pull())
        except CONNECTION_FAILURES as error:
            return describe(error)
        finally:
            self._end.close()
            self._staging_buffer.cancel_pull(self._pulling)
            self._channel.close()

    def _open(self) -> None:
        deadline_s = time.monotonic() + SETUP_TIMEOUT_S
        handshake = ServerHandshake(self._me.token)
        self._channel.shake(handshake, deadline_s)
        request = self._channel.receive(deadline_s, handshake.digest)
        if not isinstance(request, HandshakeRequest):
            raise unexpected(request, "HandshakeRequest")
        self.name = f"connection to {request.instance_id}"
        if reason := self._objection(request):
            self._channel.send(Refused(reason), deadline_s)
            raise ConnectionRefusedError(f"refused: {reason}")
        self._epoch = request.epoch
        self._end.open(self._channel, deadline_s)

    def _objection(self, request: HandshakeRequest) -> str | None:
        if request.expected != self._me.instance_id:
            return f"this is {self._me.instance_id}"
        ours = self._me.fingerprint | {"link": self._transport}
        if named := differences(ours, request.fingerprint, self._me.instance_id, request.instance_id):
            return named
        return self._admit(request, self._channel)

    def _next_pull(self) -> Pull:
        pull = self._channel.receive()
        if not isinstance(pull, Pull):
            raise unexpected(pull, "Pull")
        if pull.transfer.epoch != self._epoch:
            raise ConnectionError(f"transfer {pull.transfer} came from epoch {self._epoch}")
        return pull

    def _serve(self, pull: Pull) -> None:
        deadline_s = time.monotonic() + pull.timeout_s
        try:
            blocks = self._staging_buffer.begin_pull(pull.keys, [len(blocks) for blocks in pull.blocks])
        except NotStaged as error:
            self._channel.send(Denied(pull.transfer, str(error)), deadline_s)
            return
        self._pulling = pull.keys
        targets = [block for blocks in pull.blocks for block in blocks]
        pairs = zip(targets, blocks, strict=True)
        runs = merge((pair for pair in pairs if pair[0] != HAS_BLOCK), self._block_bytes)
        self._channel.send(Granted(pull.transfer, runs), deadline_s)
        if runs:
            self._end.send(runs)
        commit = self._channel.receive(deadline_s)
        if commit != Pulled(pull.transfer):
            raise unexpected(commit, f"Pulled({pull.transfer})")
        if self._end.is_confirmed:
            self._channel.send(Released(pull.transfer), deadline_s)
        self._staging_buffer.finish_pull(pull.keys)
        self._pulling = ()
