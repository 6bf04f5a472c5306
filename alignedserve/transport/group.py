"""The data connection of a transfer: a torch.distributed process group with two ends, one that sends and one that
pulls.

The group is built directly on its own store, apart from torch's global default group, which stays unused. So groups can
be created and removed one by one, and the death of a peer breaks one group. After a failure a group must be aborted.
The store is a file that only the user can read. A port could be used by any user of the host.

`gloo` moves CPU memory. If its peer dies or a wait times out, it closes the connection. This wakes a thread that waits
for a piece that has not started to arrive, but not one that waits for a partial piece. So one byte follows the pieces,
and the receiver waits for that byte first. The sender waits only for a message on the control connection.

`nccl` moves GPU memory, all pieces in one launch. It never notices a dead peer, so the receiver watches the control
connection while pieces are in transit.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
from torch._C._distributed_c10d import FileStore, Store
from torch.distributed import ProcessGroup, Work

from alignedserve.transport import cuda
from alignedserve.transport.channel import Channel, remaining_s

SENDER, RECEIVER = 0, 1
SETUP_TIMEOUT_S = 10.0
# The same prefix as pools' segments have, so that the files of killed processes are swept with them.
_STORE_PREFIX = "/dev/shm/alignedserve-link-"
# Never reached: this code has its own deadlines.
_NO_TIMEOUT = timedelta(hours=1)
_WATCH_S = 0.0005
# Gloo's shortest timeout, in seconds; 0 would mean none.
_SHORTEST_WAIT_S = 0.001

_Move = Callable[[list[torch.Tensor], int, int], Work]


def make_store_file() -> Path:
    """Makes the file through which the two ends meet. Its creator removes it. The next pool that sweeps removes that of
    a killed process."""
    path = Path(f"{_STORE_PREFIX}{secrets.token_hex(16)}")
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    return path


def open_store(path: Path, timeout_s: float) -> FileStore:
    """Opens the store. Raises OSError if `make_store_file` did not make the file."""
    if not re.fullmatch(re.escape(_STORE_PREFIX) + "[0-9a-f]{32}", str(path)):
        raise OSError(f"{path} is no file for a process group")
    if path.lstat().st_uid != os.getuid():
        raise OSError(f"{path} is another user's")
    store = FileStore(str(path))
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


class PairGroup:
    def __init__(
        self,
        transport: str,
        store: Store,
        rank: int,
        channel: Channel,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        """Returns when the other end has joined, which `timeout_s` limits."""
        self._channel = channel
        self._device = device
        self._peer = RECEIVER if rank == SENDER else SENDER
        self._group = ProcessGroup(store, rank, 2)
        # The pieces that were last posted to gloo, in order of sending.
        self._works: list[Work] = []
        if transport == "nccl":
            self._use_nccl(store, rank)
        else:
            self._use_gloo(store, rank, timeout_s)

    def send(self, pieces: Sequence[torch.Tensor]) -> None:
        """Starts sending and returns immediately. The pieces are in use until the other end has reported their arrival,
        or until `abort`."""
        if self._device.type == "cuda":
            self._launch(self._group.send, pieces)
        else:
            self._works = self._post(self._group.send, pieces)

    def receive(self, pieces: Sequence[torch.Tensor], deadline_s: float) -> None:
        """Receives the sent pieces, which must have the same number and sizes. Returns when all have arrived."""
        if self._device.type == "cuda":
            self._watch(self._launch(self._group.recv, pieces), deadline_s)
            return
        self._works = self._post(self._group.recv, pieces)
        for work in reversed(self._works):
            left_s = max(_SHORTEST_WAIT_S, deadline_s - time.monotonic())
            work.wait(timedelta(seconds=left_s))

    def abort(self) -> None:
        """Ends the group. No piece is read or written after this."""
        if self._works:
            with contextlib.suppress(RuntimeError):
                self._works[-1].wait(timedelta(seconds=_SHORTEST_WAIT_S))
        self._group.abort()

    def _post(self, move: _Move, pieces: Sequence[torch.Tensor]) -> list[Work]:
        last = torch.zeros(1, dtype=torch.uint8)
        return [move([piece], self._peer, tag) for tag, piece in enumerate([*pieces, last])]

    def _launch(self, move: _Move, pieces: Sequence[torch.Tensor]) -> torch.cuda.Event:
        stream = cuda.new_stream(self._device)
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            self._group._start_coalescing(self._device)
            for piece in pieces:
                move([piece], self._peer, 0)
            self._group._end_coalescing(self._device).synchronize()
        return cuda.record(stream)

    def _watch(self, moved: torch.cuda.Event, deadline_s: float) -> None:
        while not cuda.is_through(moved):
            self._channel.check_open()
            remaining_s(deadline_s)
            time.sleep(_WATCH_S)

    def _use_gloo(self, store: Store, rank: int, timeout_s: float) -> None:
        from torch.distributed import ProcessGroupGloo

        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=timeout_s)
        # Uses the address at which the two ends are already connected.
        options._devices = [ProcessGroupGloo.create_device(hostname=self._channel.sock.getsockname()[0])]
        options._threads = 1
        backend = ProcessGroupGloo(store, rank, 2, options)
        self._group._register_backend(self._device, ProcessGroup.BackendType.GLOO, backend)

    def _use_nccl(self, store: Store, rank: int) -> None:
        from torch.distributed import ProcessGroupNCCL

        # By default, torch ends the process when a communicator fails. Here only one connection is affected.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
        # NCCL listens while it connects. Both ends are on this host.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        options = ProcessGroupNCCL.Options()
        options._timeout = _NO_TIMEOUT
        backend = ProcessGroupNCCL(store, rank, 2, options)
        backend.eager_connect_single_device(self._device)
        self._group._register_backend(self._device, ProcessGroup.BackendType.NCCL, backend)
