"""The gateway process: an HTTP server with a connection to the router of each island."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from random import Random

from fastapi import FastAPI

from alignedserve.gateway.app import create_app
from alignedserve.gateway.config import GatewayConfig
from alignedserve.gateway.ending import Ending
from alignedserve.gateway.endpoints import MODULE as PREPARING
from alignedserve.gateway.generation.preparer import Preparer
from alignedserve.gateway.generation.responding import RequestBuilder
from alignedserve.gateway.grammars.compiler import Compiler
from alignedserve.gateway.http.access import Access, Callers, body_memory, callers_of
from alignedserve.gateway.http.connections import allow_descriptors
from alignedserve.gateway.http.keys import Keys
from alignedserve.gateway.http.server import GatewayServer, HttpServer
from alignedserve.gateway.islands.islands import Islands
from alignedserve.gateway.launcher_link import LauncherLink, Reports
from alignedserve.gateway.model.lengths import AnswerLengths
from alignedserve.gateway.model.served_model import ServedModel
from alignedserve.gateway.openai.adapters import AdapterChanges
from alignedserve.gateway.services import StoreServices
from alignedserve.gateway.telemetry.exposition import Gateways, metrics_route
from alignedserve.gateway.telemetry.telemetry import Telemetry, Traces
from alignedserve.process.listening import ask_for_listener, inherited, listen
from alignedserve.process.steady import collect_when_idle, settle
from alignedserve.protocol.signals import stop_on_sigterm
from alignedserve.store import Store
from alignedserve.store.homes import WatchedHome, make_home
from alignedserve.store.redis_store import RedisStore
from alignedserve.types import is_island_gateway, without_generation


class GatewayProcess:
    # Prepares request bodies. A simulation has another one.
    preparer_class = Preparer

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._lengths = AnswerLengths(config.lengths)
        self.telemetry = Telemetry(_traces(config), self._lengths.ended)
        self._services = StoreServices(config, self.telemetry.metrics)
        self.ending = Ending(self._services, config.http.shutdown_timeout, self.stop)
        self._islands = Islands(
            config.routers,
            config.instance_id,
            config.fingerprint,
            self.telemetry,
            self.ending.drain,
            config.first_island,
        )
        self._keys = Keys(config.key_owners, are_current=not config.key_owners or config.launcher is None)
        # The metrics of all gateways at this port. None if this is the only one.
        self._gateways = Gateways(config.instance_id) if config.num_gateways > 1 else None

    def run(self) -> None:
        """Runs until the router sends Stop. Raises ValueError if the model can't be loaded, OSError if the port is
        taken, and RefusedByRouter."""
        self._config.log.start(without_generation(self._config.instance_id))
        model = ServedModel.load(self._config.model_name, self._config.engine)
        self._lengths.prepare(model)
        settle()
        allow_descriptors(self._config.limits.max_connections)
        with self._listener() as sock:
            # Ray installs uvloop if it finds it, which can't start children in process groups of their own.
            asyncio.set_event_loop_policy(None)
            asyncio.run(self.serve(model, sock, is_prepared=True))

    def _listener(self) -> AbstractContextManager[socket.socket]:
        http, control = self._config.http, self._config.control
        if control:
            return ask_for_listener(control)
        if is_island_gateway(self._config.instance_id):
            return inherited(http.host, http.port)
        return listen(http.host, http.port)

    async def serve(self, model: ServedModel, sock: socket.socket, is_prepared: bool = False) -> None:
        """Serves `model` at `sock` until the gateway stops.

        `is_prepared` starts the child processes first, so that no first grammar or body waits for one. The spare
        process, which prepares the first body above 8 KiB, starts in the background."""
        self._lengths.prepare(model)
        self._islands.adapters = model.adapters
        compiler = Compiler(model.tokenizer, model.vocabulary)
        limits, slo, seeds = self._config.limits, self._config.slo, Random(self._config.engine.seed)
        preparer = self.preparer_class(model, limits, PREPARING, self._config.http.strict_parameters)
        request_builder = RequestBuilder(
            model,
            self._islands,
            compiler,
            preparer,
            limits,
            slo,
            self._lengths,
            seeds,
            self.telemetry.metrics.ignored_parameters,
            self._config.http.embedding_pooling,
        )
        memory = body_memory(limits, self._keys)
        async with (
            contextlib.aclosing(compiler),
            contextlib.aclosing(preparer),
            self.open_store() as store,
            self._lengths.running(model.name, store),
            self._services.running(request_builder, store, self._home if store else None, memory) as routers,
        ):
            if is_prepared:
                await asyncio.gather(compiler.prepare(), preparer.start())
            routers.append(
                metrics_route(
                    self.telemetry.metrics,
                    self._islands.cluster,
                    lambda: self._services.num_open_jobs,
                    self._gateways,
                    lambda: self._islands.num_wanted,
                    without_generation(self._config.instance_id),
                    model.names,
                )
            )
            http = self._config.http
            access = Access(
                memory,
                limits,
                self._keys,
                self.ending.drain_state,
                self._callers(sock),
                http.is_on_loopback,
            )
            origins, home = http.allowed_origins, self._home if store else None
            changes = AdapterChanges(model)
            app = create_app(request_builder, access, routers, origins, store, home, changes)
            await self._serve(app, sock, changes)

    def _callers(self, sock: socket.socket) -> Callers:
        http, has_keys = self._config.http, bool(self._config.key_owners)
        listened_on = (http.host, sock.getsockname()[0])
        return callers_of(listened_on, http.allowed_hosts, http.allowed_origins, has_keys)

    @contextlib.asynccontextmanager
    async def open_store(self) -> AsyncIterator[Store | None]:
        """Yields the store, and closes it after the block. A simulation overrides this."""
        if not self._config.store_url:
            yield None
            return
        home_bytes = self._home.num_bytes if self._home else None
        store = RedisStore(self._config.store_url)

        def set_limits(num_owners: int) -> None:
            store.limits = self._config.limits.of_store(num_owners, home_bytes)

        self._keys.watch(set_limits)
        try:
            yield store
        finally:
            await store.close()

    @functools.cached_property
    def _home(self) -> WatchedHome | None:
        """Where the contents of files are kept; None: in the store. Raises ValueError."""
        return WatchedHome(make_home(self._config.files_at)) if self._config.files_at else None

    async def _serve(self, app: FastAPI, sock: socket.socket, changes: AdapterChanges) -> None:
        server = self.make_server(app)
        stop_on_sigterm(self.ending.signalled)
        linked = asyncio.create_task(self._run_islands(server, changes))
        await self._keys.until_current(linked)
        if self._config.launcher and self._config.engine.max_loras:
            await changes.until_served(linked)
        serving = asyncio.create_task(server.serve([sock]))
        collecting = asyncio.create_task(collect_when_idle(lambda: not self._islands.num_open))
        # When one of them ends, the other is stopped.
        await asyncio.wait({serving, linked}, return_when=asyncio.FIRST_COMPLETED)
        self.stop()
        server.should_exit = True
        collecting.cancel()
        self.ending.cancel()
        await asyncio.gather(serving, linked)
        # Closing traces waits for their receiver, which may be unreachable.
        await asyncio.to_thread(self.telemetry.traces.close)

    async def _run_islands(self, server: HttpServer, changes: AdapterChanges) -> None:
        """Runs until `stop`, or until the launcher or all routers have sent Stop."""
        config = self._config
        if config.launcher is None:
            await self._islands.run()
            return
        reports = Reports(config, self.telemetry.metrics, self._services, self._gateways)
        link = LauncherLink(
            config.launcher,
            config,
            self._islands,
            self._keys,
            self.ending,
            server,
            reports,
            changes,
        )
        await link.run()

    def make_server(self, app: FastAPI) -> HttpServer:
        """Returns the HTTP server. A simulation overrides this: its clients call the application directly."""
        max_connections, is_shared = self._config.limits.max_connections, bool(self._gateways)
        return GatewayServer(app, self.telemetry.traces.around, max_connections, is_shared, self._keys)

    def stop(self) -> None:
        """Must be called in the event loop's thread. Safe to repeat."""
        self._islands.stop()


def _traces(config: GatewayConfig) -> Traces | None:
    if config.http.otlp_endpoint is None:
        return None
    config.http.check_traces()
    from alignedserve.gateway.telemetry.traces import OtlpTraces

    return OtlpTraces(config.http.otlp_endpoint, config.model_name)
