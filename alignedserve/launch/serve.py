"""`alignedserve serve`: checks the settings, starts Ray, plans and supervises the system, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from types import FrameType

from alignedserve.kvpool.segment import NAME_PREFIX
from alignedserve.launch.config import LaunchConfig
from alignedserve.launch.console import format_output
from alignedserve.launch.control import control_path, prepare_directory
from alignedserve.launch.nodes import Nodes, nodes_of, this_machine
from alignedserve.launch.plan import (
    IslandPlan,
    Node,
    check,
    check_quantised,
    log_of,
    plan_gateways,
    plan_island,
    plan_island_gateway,
)
from alignedserve.launch.ports import check_address
from alignedserve.launch.settings import Settings
from alignedserve.launch.store import locate_store
from alignedserve.models.locate import locate_model
from alignedserve.process.listening import bind
from alignedserve.process.private_files import make_directory
from alignedserve.store.homes import make_home
from alignedserve.version import __version__

logger = logging.getLogger(__name__)


def serve(settings: Settings, say: Callable[[str], None]) -> None:
    """Runs until a signal ends it. Raises ValueError for settings that can't work, and ProcessFailed if a process can't
    be kept running."""
    say, signals = _logging_too(settings, say), Signals()
    signals.hear()
    try:
        _serve(settings, say, signals)
    except (KeyboardInterrupt, SystemExit) as error:
        # While Ray starts, Ray's own handler exits with the signal's number.
        if isinstance(error, SystemExit) and error.code != signal.SIGTERM:
            raise
        say("stopped")


# A terminal that closes sends SIGHUP, and its shell may send another. The first one is like SIGTERM. Later ones do not
# ask for a faster end.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """Handles the signals that end the program, from the first line to the last.

    During the start they raise. The exception may be lost in code of a library, but the signal is remembered. Then they
    are held until the supervisor exists, which is called. At the end, while Ray and the store stop, they are ignored.
    """

    def __init__(self) -> None:
        self._has_come = False
        self._tell: Callable[[], object] | None = None

    def hear(self) -> None:
        for number in ENDING:
            # A program that nohup started must ignore SIGHUP.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._came)

    def hold(self) -> None:
        """Lets no signal raise from here on, because an event loop that is interrupted while it is made prints a
        traceback."""
        self._tell = lambda: None

    def tell(self, told: Callable[[], object]) -> None:
        """Calls `told` in the event loop for each signal from here on, and for one that arrived before."""
        loop, has_come = asyncio.get_running_loop(), self._has_come
        # The loop's own handlers are not used. They are removed when it closes, and a signal would then end the process
        # at once.
        self._tell = lambda: loop.call_soon_threadsafe(told)
        if has_come:
            told()

    def ignore(self) -> None:
        """Ignores the signals until the process ends. Python would remove handlers before that."""
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)

    def _came(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP and self._has_come:
            return
        self._has_come = True
        if self._tell is None:
            raise KeyboardInterrupt
        self._tell()


def _serve(settings: Settings, say: Callable[[str], None], signals: Signals) -> None:
    start_s = time.monotonic()
    http, engine = settings.http, settings.engine
    check_address(http.host, http.port)
    prepare_directory()
    path = control_path(http.host, http.port)
    model = locate_model(engine.model, engine.load_format, engine.revision)
    check(settings, model)
    check_quantised(settings, model)
    _check_event_log(settings.launch)
    _check_files_at(settings.launch)
    prefix = f"{NAME_PREFIX}{secrets.token_hex(6)}"
    with (
        bind(http.host, http.port) as listener,
        locate_store(settings.launch, prefix) as store,
        _nodes(settings, prefix, say) as nodes,
    ):
        # Ray has installed its own handler.
        signals.hear()
        say(f"Ray is up after {time.monotonic() - start_s:.1f} s")

        def plan(node: Node) -> IslandPlan:
            island = plan_island(settings, model, node, prefix)
            if island.shares_gpus:
                say(f"{node.name} has fewer GPUs than instances: they take turns, and share the memory")
            return island

        islands = [plan(node) for node in nodes.first]
        gateways = plan_gateways(settings, model, islands, store.url, nodes.launcher, path)

        def whole(island: IslandPlan) -> IslandPlan:
            """Returns the island with its own gateway, if islands have one. The launcher's host has others."""
            if not settings.launch.island_gateways or island.node.is_launchers:
                return island
            return replace(island, gateway=plan_island_gateway(gateways[0], island.node))

        url = f"http://{http.host}:{http.port}/v1"

        def ready() -> None:
            say(f"ready after {time.monotonic() - start_s:.1f} s: {url}")

        # It imports ray, which must be set up first.
        from alignedserve.launch.system_supervisor import SystemPlan, SystemSupervisor

        async def supervise() -> None:
            system = SystemPlan(
                [whole(island) for island in islands],
                lambda node: whole(plan(node)),
                gateways,
                store,
                settings.keys,
                path,
                listener,
                [os.path.abspath(os.path.expanduser(each)) for each in settings.launch.lora_modules_from],
                http.shutdown_timeout,
            )
            supervisor = SystemSupervisor(system, nodes, say, ready)
            signals.tell(supervisor.stop)
            try:
                await supervisor.run()
            finally:
                signals.ignore()

        signals.hold()
        asyncio.run(supervise())


def _logging_too(settings: Settings, say: Callable[[str], None]) -> Callable[[str], None]:
    """Formats the output of this process. Returns a function which also writes what is printed to the launcher's log
    file, if there are files. Raises ValueError."""
    format_output(settings.log.format)
    try:
        log_of(settings).start("launcher", has_console=False)
    except OSError as error:
        raise ValueError(f"log_dir={settings.log.dir!r}: {error.strerror}") from None

    def say_and_log(line: str) -> None:
        say(line)
        logger.info(line)

    return say_and_log


def _check_event_log(config: LaunchConfig) -> None:
    """Checks the event log, if it is on this machine. Raises ValueError."""
    if config.event_log is not None and config.address is None:
        try:
            make_directory(config.event_log)
        except OSError as error:
            raise ValueError(f"event_log={config.event_log!r}: {error.strerror}") from None


def _check_files_at(config: LaunchConfig) -> None:
    """Checks the place of files, if the gateway is on this machine. Raises ValueError."""
    if config.files_at is not None and config.address is None:
        try:
            make_home(config.files_at)
        except ValueError as error:
            raise ValueError(f"files_at: {error}") from None


def _nodes(settings: Settings, prefix: str, say: Callable[[str], None]) -> AbstractContextManager[Nodes]:
    say(f"starting AlignedServe {__version__}")
    token = secrets.token_hex(32)
    if settings.launch.address is None:
        return this_machine(settings.launch, token, prefix)
    needs_gpus = settings.engine.device == "cuda"
    return nodes_of(settings.launch.address, settings.launch, needs_gpus, token, say)
