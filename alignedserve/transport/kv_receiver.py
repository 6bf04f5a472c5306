"""A decode instance's end of transfers.

It has one connection per prefill instance, which is opened when needed, and reopened after a failure.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from alignedserve.transport.channel import Identity
from alignedserve.transport.completions import Completions, Done, TransferId, TransferIds
from alignedserve.transport.group import SETUP_TIMEOUT_S
from alignedserve.transport.runs import TransferSpec
from alignedserve.transport.sender_connection import Sender, SenderConnection
from alignedserve.types import InstanceId

DEFAULT_TIMEOUT_S = 30.0


class KVReceiver:
    """A decode instance's connections to KV senders. Only the instance's loop may use it. Only `close` waits."""

    def __init__(
        self, transport: str, parts: Sequence[torch.Tensor], me: Identity, completions: Completions
    ) -> None:
        """`parts`: the cache's blocks, per rank."""
        self._transport = transport
        self._parts = parts
        self._me = me
        self._ids = TransferIds(me.epoch)
        self._completions = completions
        self._connections: dict[InstanceId, SenderConnection] = {}
        # Stopped connections that may not have ended yet.
        self._stopped: list[SenderConnection] = []

    def pull(
        self,
        source: InstanceId,
        address: str,
        specs: Sequence[TransferSpec],
        done: Done,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> TransferId:
        """Pulls all blocks of the requests in one transfer. The sender keeps its copy until every byte has arrived."""
        return self._to(source, address, timeout_s).pull(specs, done, timeout_s)

    def drop(self, source: InstanceId) -> None:
        """Stops the connection to an instance that is gone. Safe to repeat."""
        if source in self._connections:
            self._connections[source].stop()
            self._stopped = [connection for connection in self._stopped if connection.error is None]
            self._stopped.append(self._connections.pop(source))

    def close(self) -> None:
        """Ends all transfers. If a sender hangs, it waits until the transfer's deadline at most."""
        for source in list(self._connections):
            self.drop(source)
        for connection in self._stopped:
            connection.close()

    def error(self, source: InstanceId) -> str | None:
        """Returns why the connection to this instance is broken; None if it works or does not exist."""
        return self._connections[source].error if source in self._connections else None

    def _to(self, source: InstanceId, address: str, timeout_s: float) -> SenderConnection:
        connection, sender = self._connections.get(source), Sender(source, address)
        if connection is not None and (connection.error is not None or connection.sender != sender):
            self.drop(source)
            connection = None
        if connection is None:
            connection = self._connections[source] = SenderConnection(
                self._transport,
                self._parts,
                sender,
                self._me,
                self._ids,
                self._completions,
                setup_timeout_s=min(timeout_s, SETUP_TIMEOUT_S),
            )
        return connection
