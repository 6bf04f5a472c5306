"""A decode instance's connection to a KV sender. It pulls staged blocks into the instance's own cache.

Its thread opens the connection and then makes the pulls in the order of their starts. When idle, it watches the
connection, so it notices the other end's death immediately. Any failure, a timeout included, breaks the connection for
good: its current and later transfers end with an error. `kv_receiver.py` then opens another connection.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from alignedserve.protocol.handshake import ClientHandshake
from alignedserve.protocol.messages import Refused
from alignedserve.transport.channel import (
    Channel,
    Denied,
    Granted,
    HandshakeRequest,
    Identity,
    Opened,
    Pull,
    Pulled,
    Released,
    encoded,
    remaining_s,
)
from alignedserve.transport.completions import Completions, Done, Outcome, TransferId, TransferIds
from alignedserve.transport.copiers import as_bytes
from alignedserve.transport.data_path import ReceiverEnd, receiver_end
from alignedserve.transport.failures import CONNECTION_FAILURES, describe, unexpected
from alignedserve.transport.runs import TransferSpec, check_blocks, wanted
from alignedserve.types import InstanceId

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _PullJob:
    transfer: TransferId
    specs: Sequence[TransferSpec]
    deadline_s: float
    done: Done

    def frame(self) -> Pull:
        keys = [key for key, _ in self.specs]
        blocks = [list(blocks) for _, blocks in self.specs]
        return Pull(self.transfer, keys, blocks, self.deadline_s - time.monotonic())


@dataclass(frozen=True)
class Sender:
    instance_id: InstanceId
    address: str


class SenderConnection:
    def __init__(
        self,
        transport: str,
        parts: Sequence[torch.Tensor],
        sender: Sender,
        me: Identity,
        ids: TransferIds,
        completions: Completions,
        setup_timeout_s: float,
    ) -> None:
        self.sender = sender
        # Why the connection is broken; None while it works.
        self.error: str | None = None
        self._transport = transport
        self._parts = [as_bytes(part) for part in parts]
        self._me = me
        self._ids = ids
        self._completions = completions
        self._setup_timeout_s = setup_timeout_s
        self._jobs: deque[_PullJob] = deque()
        self._lock = threading.Lock()
        self._is_stopping = False
        # The channel belongs to the thread, but any thread may shut it.
        self._channel: Channel | None = None
        self._wake_fd = os.eventfd(0)
        self._thread = threading.Thread(
            target=self._run, name=f"sender-connection-{sender.instance_id}", daemon=True
        )
        self._thread.start()

    def pull(self, specs: Sequence[TransferSpec], done: Done, timeout_s: float) -> TransferId:
        """Pulls all blocks of the requests in one transfer, which fails as a whole. `timeout_s` counts from now."""
        check_blocks(wanted(specs), len(self._parts[0]), "the KV cache")
        job = _PullJob(self._ids.next(), specs, time.monotonic() + timeout_s, done)
        with self._lock:
            if self.error is None:
                self._jobs.append(job)
                os.eventfd_write(self._wake_fd, 1)
            else:
                self._post(job, self.error)
        return job.transfer

    def stop(self) -> None:
        """Ends all transfers and the connection, without waiting. Safe to repeat."""
        with self._lock:
            self._is_stopping = True
            if self._channel is not None:
                self._channel.shut()

    def close(self) -> None:
        """Stops, and waits for the end. If the other end hangs, it waits until the running transfer's deadline at
        most."""
        self.stop()
        self._thread.join()

    def _run(self) -> None:
        open_things = contextlib.ExitStack()
        reason = "its thread failed"
        try:
            channel, end = self._open(open_things)
            while (job := self._next_job(channel)) is not None:
                begun_s = time.perf_counter()
                failure = self._carry_out(job, channel, end)
                self._end(job, failure, time.perf_counter() - begun_s)
            reason = "closed"
        except CONNECTION_FAILURES as error:
            reason = "closed" if self._is_stopping else describe(error)
        finally:
            open_things.close()
            self._break(reason)

    def _open(self, open_things: contextlib.ExitStack) -> tuple[Channel, ReceiverEnd]:
        host, port = self.sender.address.rsplit(":", 1)
        deadline_s = time.monotonic() + self._setup_timeout_s
        channel = Channel(socket.create_connection((host, int(port)), timeout=remaining_s(deadline_s)))
        open_things.callback(channel.close)
        with self._lock:
            self._channel = channel
        channel.shake(ClientHandshake(self._me.token, lambda: encoded(self._handshake_request())), deadline_s)
        answer = channel.receive(deadline_s)
        if isinstance(answer, Refused):
            raise ConnectionRefusedError(f"refused: {answer.reason}")
        if not isinstance(answer, Opened):
            raise unexpected(answer, "Opened")
        end = receiver_end(self._transport, self._parts)
        open_things.callback(end.close)
        end.open(channel, answer, deadline_s)
        return channel, end

    def _handshake_request(self) -> HandshakeRequest:
        me = self._me
        return HandshakeRequest(
            self.sender.instance_id, me.instance_id, me.epoch, me.fingerprint | {"link": self._transport}
        )

    def _next_job(self, channel: Channel) -> _PullJob | None:
        with selectors.DefaultSelector() as selector:
            selector.register(channel.sock, selectors.EVENT_READ)
            selector.register(self._wake_fd, selectors.EVENT_READ)
            while not self._is_stopping and not self._jobs:
                ready = [key.fileobj for key, _ in selector.select()]
                if channel.sock in ready:
                    raise unexpected(channel.receive(time.monotonic() + self._setup_timeout_s), "nothing")
                os.eventfd_read(self._wake_fd)
        return None if self._is_stopping else self._jobs[0]

    def _carry_out(self, job: _PullJob, channel: Channel, end: ReceiverEnd) -> str | Denied | None:
        """Makes a pull. Returns why it failed if the connection can still be used, and raises if it can't."""
        if time.monotonic() >= job.deadline_s:
            return "its deadline passed before it could begin"
        channel.send(job.frame(), job.deadline_s)
        answer = channel.receive(job.deadline_s)
        if isinstance(answer, Denied) and answer.transfer == job.transfer:
            return answer
        if not isinstance(answer, Granted) or answer.transfer != job.transfer:
            raise unexpected(answer, f"an answer to {job.transfer}")
        self._check(job, answer)
        if answer.runs:
            end.pull(answer.runs, job.deadline_s)
        channel.send(Pulled(job.transfer), job.deadline_s)
        if end.is_confirmed:
            answer = channel.receive(job.deadline_s)
            if answer != Released(job.transfer):
                raise unexpected(answer, f"Released({job.transfer})")
        return None

    @staticmethod
    def _check(job: _PullJob, granted: Granted) -> None:
        asked = wanted(job.specs)
        offered = [block for run in granted.runs for block in range(run.here, run.here + run.num_blocks)]
        if asked != offered or any(run.num_blocks < 1 for run in granted.runs):
            raise ConnectionError(f"{len(asked)} blocks were asked for, {len(offered)} others were granted")

    def _end(self, job: _PullJob, failure: str | Denied | None, took_s: float) -> None:
        with self._lock:
            self._jobs.popleft()
        if isinstance(failure, Denied):
            self._post(job, failure.reason, took_s, is_denied=True)
        else:
            self._post(job, failure, took_s)

    def _break(self, reason: str) -> None:
        with self._lock:
            self.error = f"connection to {self.sender.instance_id}: {reason}"
            os.close(self._wake_fd)
            jobs = list(self._jobs)
            self._jobs.clear()
        logger.info(self.error)
        for job in jobs:
            self._post(job, self.error)

    def _post(self, job: _PullJob, error: str | None, took_s: float = 0.0, is_denied: bool = False) -> None:
        keys = tuple(key for key, _ in job.specs)
        num_bytes = len(wanted(job.specs)) * sum(part.shape[1] for part in self._parts)
        outcome = Outcome(job.transfer, "pull", keys, error, num_bytes, took_s, is_denied)
        self._completions.post(job.done, outcome)
