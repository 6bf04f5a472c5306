"""The data path of `gloo` and `nccl`: both ends form a process group and move the blocks through it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from alignedserve.transport.channel import Channel, Joining, Opened, remaining_s
from alignedserve.transport.failures import unexpected
from alignedserve.transport.group import RECEIVER, SENDER, PairGroup, make_store_file, open_store
from alignedserve.transport.runs import Run


class _GroupEnd:
    # The sender holds the blocks during the whole transfer, so no confirmation is needed.
    is_confirmed = False

    def __init__(self, transport: str, parts: Sequence[torch.Tensor]) -> None:
        self._transport = transport
        # The blocks per rank, all on one device.
        self._parts = parts
        self._group: PairGroup | None = None

    def close(self) -> None:
        if self._group is not None:
            self._group.abort()


class GroupSender(_GroupEnd):
    def open(self, channel: Channel, deadline_s: float) -> None:
        channel.send(Opened(), deadline_s)
        joining = channel.receive(deadline_s)
        if not isinstance(joining, Joining):
            raise unexpected(joining, "Joining")
        store = open_store(Path(joining.store), remaining_s(deadline_s))
        timeout_s = remaining_s(deadline_s)
        self._group = PairGroup(self._transport, store, SENDER, channel, self._parts[0].device, timeout_s)

    def send(self, runs: Sequence[Run]) -> None:
        assert self._group is not None
        self._group.send(
            [part[run.there : run.there + run.num_blocks] for run in runs for part in self._parts]
        )


class GroupReceiver(_GroupEnd):
    # The file that this end made and will remove.
    _store_file: Path | None = None

    def open(self, channel: Channel, opened: Opened, deadline_s: float) -> None:
        self._store_file = make_store_file()
        store = open_store(self._store_file, remaining_s(deadline_s))
        channel.send(Joining(str(self._store_file)), deadline_s)
        timeout_s = remaining_s(deadline_s)
        self._group = PairGroup(self._transport, store, RECEIVER, channel, self._parts[0].device, timeout_s)

    def close(self) -> None:
        super().close()
        if self._store_file is not None:
            self._store_file.unlink(missing_ok=True)

    def pull(self, runs: Sequence[Run], deadline_s: float) -> None:
        assert self._group is not None
        wanted = [part[run.here : run.here + run.num_blocks] for run in runs for part in self._parts]
        self._group.receive(wanted, deadline_s)
