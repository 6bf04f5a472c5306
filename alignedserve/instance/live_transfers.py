"""Copies of KV between real memories. Implements `executor.Transfers`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from alignedserve.instance.config import TransferConfig
from alignedserve.kv.format import BlockFormat
from alignedserve.transport.block_checks import BlockChecks, Words
from alignedserve.transport.channel import Identity
from alignedserve.transport.completions import Completions, Done
from alignedserve.transport.kv_receiver import KVReceiver
from alignedserve.transport.kv_sender import KVSender
from alignedserve.transport.mover import Mover, PoolBlocks
from alignedserve.transport.runs import Pairs, TransferSpec
from alignedserve.transport.staging_buffer import StagingBuffer
from alignedserve.types import BlockId, Epoch, InstanceId, RequestKey


class LiveTransfers:
    def __init__(
        self,
        parts: Sequence[torch.Tensor],
        epoch: Epoch,
        wake: Callable[[], object] = lambda: None,
        config: TransferConfig | None = None,
        pool_format: BlockFormat | None = None,
        num_groups: int = 1,
    ) -> None:
        """`parts`: the cache's blocks, per rank. `wake` is called, on another thread, when `completions` has something
        to run. `pool_format`: the format of the pool's blocks; None if it is the cache's. `num_groups`: blocks per
        column."""
        self._parts = parts
        self._epoch = epoch
        self._config = config or TransferConfig()
        self._pool_format = pool_format
        self._num_groups = num_groups
        self.completions = Completions(wake)
        self.pool_mover: Mover | None = None
        self._staging_buffer = StagingBuffer(epoch, self.completions)
        self._kv_sender: KVSender | None = None
        self._kv_receiver: KVReceiver | None = None

    @property
    def staging_share(self) -> float:
        return self._config.staging_share if self._config.is_staged else 0.0

    # ---- between instances -------------------------------------------------------------------------------------------

    def listen(self, me: Identity) -> str:
        """Lets decode instances connect and pull. Returns the address, which is empty if KV only goes through the
        pool's memory."""
        if not self._config.is_staged:
            return ""
        self._kv_sender = KVSender(self._config.transport, self._parts, self._staging_buffer, me)
        return self._kv_sender.address

    def be_known_as(self, me: Identity) -> None:
        """Sets the identity for this instance's pulls. Call it before the first pull."""
        if self._config.is_staged:
            self._kv_receiver = KVReceiver(self._config.transport, self._parts, me, self.completions)

    def stage(self, key: RequestKey, blocks: Sequence[BlockId], done: Done) -> None:
        self._staging_buffer.put(key, blocks, done)

    def unstage(self, key: RequestKey) -> None:
        self._staging_buffer.withdraw(key)

    def pull(self, source: InstanceId, address: str, specs: Sequence[TransferSpec], done: Done) -> None:
        if self._kv_receiver is None:
            keys = [key for key, _ in specs]
            raise RuntimeError(
                f"requests {keys} are staged at {source}, but there is no KV receiver: link='host'"
            )
        self._kv_receiver.pull(source, address, specs, done, self._config.timeout_s)

    def cut(self) -> None:
        if self._kv_sender is not None:
            self._kv_sender.cut()
        if self._kv_receiver is not None:
            self._kv_receiver.close()

    # ---- from and to the pool ----------------------------------------------------------------------------------------

    def use_pool(self, pool: NDArray[np.uint8], checksums: Words | None = None) -> None:
        """`pool` has shape [columns, bytes of a column]. `checksums` has a word for each block; None: no other instance
        uses the pool."""
        self.leave_pool()
        num_columns, column_bytes = pool.shape
        num_blocks = num_columns * self._num_groups
        blocks = pool.reshape(num_blocks, column_bytes // self._num_groups)
        words = np.zeros(num_blocks, np.uint64) if checksums is None else checksums
        self.pool_mover = Mover(
            self._parts,
            PoolBlocks(blocks, self._pool_format, BlockChecks(blocks, words, self._config.verify_blocks)),
            self._epoch,
            self.completions,
            quick_bytes=self._config.quick_bytes,
        )

    @property
    def checks_some_blocks(self) -> bool:
        return 0 < self._config.verify_blocks < 1

    def leave_pool(self) -> None:
        if self.pool_mover is not None:
            self.pool_mover.close()
            self.pool_mover = None

    def load(self, key: RequestKey, pairs: Pairs, done: Done, is_urgent: bool = False) -> None:
        self._mover.load(key, pairs, done, self._config.timeout_s, is_urgent)

    def save(
        self, key: RequestKey, pairs: Pairs, num_empty: int, done: Done, is_urgent: bool = False
    ) -> None:
        self._mover.save(key, pairs, done, self._config.timeout_s, is_urgent, num_empty)

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
        if self._kv_receiver is not None:
            self._kv_receiver.close()
        if self._kv_sender is not None:
            self._kv_sender.close()
