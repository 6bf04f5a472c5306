"""A prefill instance's end of transfers: it listens, and decode instances pull from the staging buffer.

Each decode instance has a thread here (`transfer_session.py`). A restarted decode instance has a greater epoch. Its old
connection is then closed, and requests of older epochs are refused.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Sequence

import torch

from alignedserve.transport.channel import Channel, HandshakeRequest, Identity, shut
from alignedserve.transport.copiers import as_bytes
from alignedserve.transport.data_path import sender_ends
from alignedserve.transport.staging_buffer import StagingBuffer
from alignedserve.transport.transfer_session import TransferSession
from alignedserve.types import Epoch, InstanceId

logger = logging.getLogger(__name__)

# The most connections, with a thread each, that have not proved that they belong to this cluster. A further one
# replaces the oldest.
MAX_STRANGERS = 16


class KVSender:
    def __init__(
        self,
        transport: str,
        parts: Sequence[torch.Tensor],
        staging_buffer: StagingBuffer,
        me: Identity,
        host: str = "127.0.0.1",
    ) -> None:
        """`parts`: the cache's blocks, per rank."""
        self._transport = transport
        # Keeps the memory alive while blocks can be pulled, whatever the caller does.
        self._parts = [as_bytes(part) for part in parts]
        self._make_end = sender_ends(transport, self._parts)
        self._staging_buffer = staging_buffer
        self._me = me
        # The latest epoch of each decode instance, and its connection.
        self._peers: dict[InstanceId, tuple[Epoch, Channel]] = {}
        self._channels: dict[threading.Thread, Channel] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._listener = socket.create_server((host, 0))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, name="kv-sender", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends all transfers. Their requests can be pulled again."""
        with self._lock:
            self._is_closed = True
        shut(self._listener)
        self._thread.join()
        self._listener.close()
        for thread, channel in self._channels.items():
            channel.shut()
            thread.join()

    def cut(self) -> None:
        """Ends all transfers and returns immediately. Decode instances reconnect at their next pull."""
        with self._lock:
            for channel in self._channels.values():
                channel.shut()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                raise
            self._start(Channel(sock))

    def _start(self, channel: Channel) -> None:
        thread = threading.Thread(
            target=self._run_session, args=(channel,), name="transfer-session", daemon=True
        )
        with self._lock:
            if self._is_closed:
                channel.sock.close()
                return
            self._channels = {old: its for old, its in self._channels.items() if old.is_alive()}
            strangers = [each for each in self._channels.values() if not each.is_proven]
            if len(strangers) >= MAX_STRANGERS:
                strangers[0].shut()
            self._channels[thread] = channel
            thread.start()

    def _run_session(self, channel: Channel) -> None:
        end = self._make_end()
        block_bytes = sum(part.shape[1] for part in self._parts)
        session = TransferSession(
            self._transport, end, block_bytes, self._staging_buffer, self._me, channel, self._admit
        )
        reason = session.run()
        logger.info("%s: %s", session.name, reason)

    def _admit(self, request: HandshakeRequest, channel: Channel) -> str | None:
        """Admits the receiver if it has its instance's latest epoch. Otherwise returns why not."""
        with self._lock:
            epoch, old = self._peers.get(request.instance_id, (request.epoch, channel))
            if request.epoch < epoch:
                return f"{request.instance_id} has started anew: epoch {request.epoch} is over, it is {epoch} now"
            if old is not channel:
                old.shut()
            self._peers[request.instance_id] = (request.epoch, channel)
            return None
