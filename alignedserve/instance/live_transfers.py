"""Copies of KV between real memories: see `executor.Transfers`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from alignedserve.instance.config import TransferConfig
from alignedserve.instance.executor import Pairs, Wanted
from alignedserve.transport.channel import Identity
from alignedserve.transport.completions import Completions, Done
from alignedserve.transport.lender import Lender
from alignedserve.transport.links import Links
from alignedserve.transport.mover import Mover
from alignedserve.transport.shelf import Shelf
from alignedserve.types import BlockId, Epoch, InstanceId, RequestKey


class LiveTransfers:
    def __init__(
        self,
        blocks: torch.Tensor,
        epoch: Epoch,
        wake: Callable[[], object] = lambda: None,
        config: TransferConfig | None = None,
    ) -> None:
        """`wake` is called, on another thread, when `completions` has something to run."""
        self._blocks = blocks
        self._epoch = epoch
        self._config = config or TransferConfig()
        self.completions = Completions(wake)
        self.pool_mover: Mover | None = None
        self._shelf = Shelf(epoch, self.completions)
        self._lender: Lender | None = None
        self._links: Links | None = None

    @property
    def staging_share(self) -> float:
        return self._config.staging_share if self._config.is_staged else 0.0

    # ---- between instances -------------------------------------------------------------------------------------------

    def listen(self, me: Identity) -> str:
        """For decode instances which pull. Returns the address, empty where the pool's memory is the only way."""
        if not self._config.is_staged:
            return ""
        self._lender = Lender(self._config.link, self._blocks, self._shelf, me)
        return self._lender.address

    def be_known_as(self, me: Identity) -> None:
        """To prefill instances, before the first pull."""
        if self._config.is_staged:
            self._links = Links(self._config.link, self._blocks, me, self.completions)

    def stage(self, key: RequestKey, blocks: Sequence[BlockId], done: Done) -> None:
        self._shelf.put(key, blocks, done)

    def unstage(self, key: RequestKey) -> None:
        self._shelf.withdraw(key)

    def pull(self, source: InstanceId, address: str, wanted: Wanted, done: Done) -> None:
        if self._links is None:
            keys = [key for key, _ in wanted]
            raise RuntimeError(f"requests {keys} are staged at {source}, but there are no links: link='host'")
        self._links.pull(source, address, wanted, done, self._config.timeout_s)

    def is_reachable(self, source: InstanceId) -> bool:
        return self._links is not None and self._links.error(source) is None

    def cut(self) -> None:
        if self._lender is not None:
            self._lender.cut()
        if self._links is not None:
            self._links.close()

    # ---- from and to the pool ----------------------------------------------------------------------------------------

    def use_pool(self, pool: NDArray[np.uint8]) -> None:
        self.leave_pool()
        quick_bytes = self._config.quick_bytes
        self.pool_mover = Mover(self._blocks, pool, self._epoch, self.completions, quick_bytes=quick_bytes)

    def leave_pool(self) -> None:
        if self.pool_mover is not None:
            self.pool_mover.close()
            self.pool_mover = None

    def load(self, key: RequestKey, pairs: Pairs, done: Done, is_urgent: bool = False) -> None:
        self._mover.load(key, pairs, done, self._config.timeout_s, is_urgent)

    def save(self, key: RequestKey, pairs: Pairs, done: Done, is_urgent: bool = False) -> None:
        self._mover.save(key, pairs, done, self._config.timeout_s, is_urgent)

    def abandon(self, key: RequestKey) -> None:
        if self.pool_mover is not None:
            self.pool_mover.abandon(key)

    @property
    def _mover(self) -> Mover:
        if self.pool_mover is None:
            raise RuntimeError("an order that needs the pool's memory came before UsePool")
        return self.pool_mover

    def close(self) -> None:
        self.leave_pool()
        if self._links is not None:
            self._links.close()
        if self._lender is not None:
            self._lender.close()
