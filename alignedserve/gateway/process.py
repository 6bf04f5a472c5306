"""The gateway's process: an HTTP server, and a connection to the router."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

import uvicorn

from alignedserve.config import EngineConfig
from alignedserve.gateway.app import create_app
from alignedserve.gateway.doors import Doors
from alignedserve.gateway.islands import Islands
from alignedserve.gateway.keys import Keys
from alignedserve.gateway.limits import Limits
from alignedserve.gateway.model import ServedModel
from alignedserve.types import InstanceId
from alignedserve.wire import RouterAddress, stop_on_sigterm

# Streams that are open when the server stops get so long to say goodbye.
GOODBYE_S = 1


@dataclass(frozen=True)
class GatewayConfig:
    instance_id: InstanceId
    # of each island
    routers: tuple[RouterAddress, ...]
    host: str
    port: int
    engine: EngineConfig
    served_model_name: str
    # what has to be the same everywhere
    fingerprint: dict[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    # of the API keys, see keys.py; none: open to everyone
    key_digests: tuple[bytes, ...] = ()
    # requests that run when the server is told to stop get so long to finish
    shutdown_timeout_s: float = 30.0


class GatewayProcess:
    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._islands = Islands(config.routers, config.instance_id, config.fingerprint, self.drain)
        self.doors = Doors()
        self._draining: asyncio.Task[None] | None = None

    def run(self) -> None:
        """Until the router tells it to stop. Raises ValueError for a model that can't be, OSError for a port that is
        taken, and RefusedByRouter."""
        model = ServedModel.load(self._config.served_model_name, self._config.engine)
        model.grammars.prepare()
        with listen(self._config.host, self._config.port) as sock:
            asyncio.run(self.serve(model, sock))

    async def serve(self, model: ServedModel, sock: socket.socket) -> None:
        keys = Keys(self._config.key_digests)
        app = create_app(model, self._islands, self.doors, keys, self._config.limits)
        server = _Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=GOODBYE_S))
        stop_on_sigterm(self._signalled)
        serving = asyncio.create_task(server.serve([sock]))
        linked = asyncio.create_task(self._islands.run())
        # whichever ends takes the other with it
        await asyncio.wait({serving, linked}, return_when=asyncio.FIRST_COMPLETED)
        self.stop()
        server.should_exit = True
        if self._draining:
            self._draining.cancel()
        await asyncio.gather(serving, linked)

    def drain(self) -> None:
        """Takes no new requests, and stops when those that run have finished, or their time is up. Safe to repeat."""
        self.doors.close()
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.doors.until_empty(), self._config.shutdown_timeout_s)
        self.stop()

    def _signalled(self) -> None:
        """Whoever asks twice does not want to wait."""
        self.stop() if self.doors.are_closed else self.drain()

    def stop(self) -> None:
        """In the event loop's thread. Safe to repeat."""
        self._islands.stop()


def listen(host: str, port: int) -> socket.socket:
    """Raises OSError, which names the address, when it can't be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise OSError(error.errno, f"{host}:{port}: {error.strerror}") from None


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's affair, not the server's."""
        yield
