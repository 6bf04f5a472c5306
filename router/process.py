"""The router's process."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from alignedserve.process.logs import LogConfig
from alignedserve.process.private_files import create, make_directory
from alignedserve.process.steady import settle
from alignedserve.process.usage import UsageMeter
from alignedserve.protocol.address import RouterAddress
from alignedserve.protocol.connection import new_epoch
from alignedserve.protocol.signals import stop_on_sigterm
from alignedserve.router.config import RouterConfig
from alignedserve.router.eventlog import EventLog
from alignedserve.router.router import Router
from alignedserve.router.server import RouterServer
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.types import GATEWAY, Epoch, InstanceId


@dataclass(frozen=True)
class RouterProcessConfig:
    # Its own address, and the token that processes must know to connect.
    address: RouterAddress
    router: RouterConfig
    # The role of each process that should exist.
    expected: dict[InstanceId, str] = field(default_factory=dict)
    # The directory for event logs, one per epoch. They contain prompts and answers.
    event_log: str | None = None
    log: LogConfig = field(default_factory=LogConfig)
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    gateways: tuple[InstanceId, ...] = (GATEWAY,)


class RouterProcess:
    def __init__(self, config: RouterProcessConfig) -> None:
        self._config = config

    def run(self) -> None:
        """Runs until it is told to stop. Raises OSError if another process listens at its address."""
        self._config.log.start("router")
        settle()
        with ExitStack() as files:
            asyncio.run(self._run(new_epoch(), files))

    async def _run(self, epoch: Epoch, files: ExitStack) -> None:
        config = self._config
        log = self._event_log(epoch, files)
        router = Router(config.router, epoch, config.scheduling)
        server = RouterServer(
            router,
            epoch,
            config.address.token,
            config.expected,
            log,
            config.gateways,
            usage_of=UsageMeter().usage_of,
        )
        await server.listen_at(config.address)
        stop_on_sigterm(server.stop)
        await server.run()

    def _event_log(self, epoch: Epoch, files: ExitStack) -> EventLog | None:
        if self._config.event_log is None:
            return None
        directory = Path(self._config.event_log)
        make_directory(directory)
        file = files.enter_context(create(directory / f"router-{epoch}.events"))
        return EventLog(file, self._config.router, epoch, self._config.scheduling)
