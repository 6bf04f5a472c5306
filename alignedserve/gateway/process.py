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
from alignedserve.gateway.calls import Calls
from alignedserve.gateway.exposition import metrics_route
from alignedserve.gateway.islands import Islands
from alignedserve.gateway.model import ServedModel
from alignedserve.gateway.telemetry import Telemetry, Traces
from alignedserve.logs import set_up_logging
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
    # one of logs.FORMATS
    log_format: str = "text"
    # None: stderr
    log_file: str | None = None
    # where traces go; None: nowhere
    otlp_endpoint: str | None = None


class GatewayProcess:
    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self.telemetry = Telemetry(_traces(config))
        self._islands = Islands(config.routers, config.instance_id, config.fingerprint, self.telemetry)

    def run(self) -> None:
        """Until the router tells it to stop. Raises ValueError for a model that can't be, OSError for a port that is
        taken, and RefusedByRouter."""
        set_up_logging(self._config.log_format, path=self._config.log_file)
        model = ServedModel.load(self._config.served_model_name, self._config.engine)
        with listen(self._config.host, self._config.port) as sock:
            asyncio.run(self.serve(model, sock))

    async def serve(self, model: ServedModel, sock: socket.socket) -> None:
        app = create_app(model, self._islands)
        app.include_router(metrics_route(self.telemetry.metrics, self._islands))
        server = _Server(
            uvicorn.Config(
                Calls(app, self.telemetry.traces.around),
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=GOODBYE_S,
            )
        )
        stop_on_sigterm(self.stop)
        serving = asyncio.create_task(server.serve([sock]))
        linked = asyncio.create_task(self._islands.run())
        # whichever ends takes the other with it
        await asyncio.wait({serving, linked}, return_when=asyncio.FIRST_COMPLETED)
        self.stop()
        server.should_exit = True
        await asyncio.gather(serving, linked)
        # it waits for the receiver, which may be away
        await asyncio.to_thread(self.telemetry.traces.close)

    def stop(self) -> None:
        """In the event loop's thread. Safe to repeat."""
        self._islands.stop()


def _traces(config: GatewayConfig) -> Traces | None:
    if config.otlp_endpoint is None:
        return None
    try:
        from alignedserve.gateway.traces import OtlpTraces
    except ImportError as error:
        raise ValueError(f"otlp_endpoint: needs the extra alignedserve[otel] ({error})") from None
    return OtlpTraces(config.otlp_endpoint)


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
