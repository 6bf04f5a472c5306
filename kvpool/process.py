"""The pool's process: makes the segment, or takes over its predecessor's, and answers the router."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from alignedserve.kv.format import BlockFormat
from alignedserve.kvpool.pool import TICK_S, Pool, PoolConfig, PoolShell
from alignedserve.kvpool.segment import DIRECTORY, Segment, is_private, sweep
from alignedserve.process.logs import LogConfig
from alignedserve.process.steady import settle
from alignedserve.protocol.address import RouterAddress
from alignedserve.protocol.connection import RouterConnection, new_epoch, start_of
from alignedserve.protocol.messages import Hello
from alignedserve.protocol.signals import stop_on_sigterm
from alignedserve.types import Epoch, InstanceId

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PoolProcessConfig:
    instance_id: InstanceId
    router: RouterAddress
    # A segment's name is this prefix and the epoch of the process that made it.
    segment_prefix: str
    form: BlockFormat
    num_blocks: int
    log: LogConfig = field(default_factory=LogConfig)
    pool: PoolConfig = field(default_factory=PoolConfig)


class PoolProcess:
    def __init__(self, config: PoolProcessConfig) -> None:
        self._config = config

    def run(self) -> None:
        """Runs until the router tells it to stop, and then unlinks the segment. After SIGTERM the segment stays for the
        next pool. Raises ValueError if there is too little shared memory."""
        self._config.log.start(self._config.instance_id)
        epoch = new_epoch()
        for name in sweep():
            logger.info("Removed segment %s, which a killed system had left", name)
        segment = open_segment(self._config, epoch)
        settle()
        try:
            was_told_to_stop = asyncio.run(self._serve(segment, epoch))
        finally:
            segment.close()
        if was_told_to_stop:
            Segment.unlink(segment.name)

    async def _serve(self, segment: Segment, epoch: Epoch) -> bool:
        pool = Pool(segment.table, self._config.form.block_size, time.monotonic(), self._config.pool)
        shell = PoolShell(pool, lambda message: connection.send(message), lambda: connection.is_up)
        connection = RouterConnection(
            self._config.router, lambda: _hello(self._config, segment, pool, epoch), shell
        )
        stop_on_sigterm(connection.stop)
        connection.repeat(TICK_S, shell.tick)
        await connection.run()
        return connection.was_told_to_stop


def open_segment(config: PoolProcessConfig, epoch: Epoch) -> Segment:
    for name in segments(config.segment_prefix):
        try:
            return Segment.attach(name, config.form)
        except ValueError as error:
            logger.warning("Not taking over what an earlier pool left: %s", error)
            Segment.unlink(name)
    # A new name, so that a process that still maps an older segment can't mistake this one for it.
    return Segment.create(f"{config.segment_prefix}-{epoch}", config.form, config.num_blocks)


def segments(prefix: str) -> list[str]:
    """Returns the names of this user's segments, the latest first."""
    return sorted((path.name for path in DIRECTORY.glob(f"{prefix}-*") if _is_ours(path)), reverse=True)


def _is_ours(path: Path) -> bool:
    try:
        return is_private(path.lstat())
    except FileNotFoundError:
        return False


def _hello(config: PoolProcessConfig, segment: Segment, pool: Pool, epoch: Epoch) -> Hello:
    window = config.pool.span.window if config.pool.span else 0
    return Hello(
        role="kvpool",
        instance_id=config.instance_id,
        epoch=epoch,
        pid=os.getpid(),
        fingerprint=config.form.describe() | {"window": str(window)},
        limits=config.pool.limits(segment.num_blocks, config.form.block_size),
        segment=segment.name,
        inventory=pool.inventory(),
        started_s=start_of(epoch),
        knows_content=pool.knows_content,
    )
