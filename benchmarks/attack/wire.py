"""What another user of the machine can do to a server: through its files, and its ports other than HTTP's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Iterable
from typing import Any

import httpx2

from benchmarks.attack.nobody import IS_POSSIBLE, as_nobody
from benchmarks.attack.surface import reached, surface_of, tcp_ports
from benchmarks.attack.target import Finding, Target

# Announces a frame of 64 MB, and begins to send it.
_BIG = (64 << 20).to_bytes(4, "big") + bytes(8 << 20)
_HTTP = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
# A forged nonce and proof, and the message that would stop everything.
_FORGED = bytes(64) + b"\0\0\0\x05\x91\xa4Stop"
# The most that a client without a valid proof may receive: a nonce and a proof.
_MAX_TOLD_BYTES = 64
# What our process sends first to anything that listens in the router's place.
_NONCE_BYTES = 32
_TLS = b"\x16\x03"
# What turns a client away: TLS, or HTTP that requires a token.
_TURNED_AWAY = (b"\x15\x03", b"HTTP/1.1 4", b"HTTP/1.0 4")
_NOT_RUN = "not run: it takes root to be another user"
_LISTEN_S, _RECOVER_S = 6.0, 30.0


async def attack_files(target: Target) -> Finding:
    """Looks for a file, directory, socket or piece of shared memory that another user can open."""
    name = "files, sockets and memory are the user's alone"
    if not IS_POSSIBLE:
        return Finding(name, True, _NOT_RUN)
    surface = surface_of(target.pid, target.state_dir)
    found = await asyncio.to_thread(as_nobody, lambda: reached(surface))
    detail = f"{len(surface.paths)} looked at; {len(found)} within reach" + "".join(
        f"; {each}" for each in found[:9]
    )
    return Finding(name, not found, detail)


async def attack_ports(target: Target) -> Finding:
    """Connects to each port except HTTP's, in several ways, without knowing a secret."""
    ports = sorted(surface_of(target.pid).ports - {target.port})
    answers = await asyncio.gather(
        *(_ask(port, said) for port in ports for said in (_BIG, _HTTP, _FORGED, b"") for _ in range(2))
    )
    told = {
        f"port {port} says {answer[:40]!r}"
        for port, answer in answers
        if len(answer) > _MAX_TOLD_BYTES and not answer.startswith(_TURNED_AWAY)
    }
    detail = f"{len(answers)} conversations on {len(ports)} ports" + "".join(
        f"; {each}" for each in sorted(told)[:9]
    )
    return Finding("other ports tell strangers nothing", not told, detail)


async def attack_router_s_place(target: Target) -> Finding:
    """Kills the router and, as another user, takes over its ports before it is restarted."""
    name = "who takes the dead router's place learns nothing, and the server is whole again"
    if not IS_POSSIBLE:
        return Finding(name, True, _NOT_RUN)
    async with httpx2.AsyncClient(base_url=target.url, timeout=10 * target.slack) as http:
        before = await _processes(http)
        router = next(each for each in before if each["role"] == "router")
        ports, secret = tcp_ports([router["pid"]]), _ray_token(router["pid"])
        os.kill(router["pid"], signal.SIGKILL)
        heard = await asyncio.to_thread(as_nobody, lambda: _impersonate(ports, _LISTEN_S))
        is_whole = await _until_whole(http, len(before), router["pid"], _RECOVER_S * target.slack)
    said = [bytes.fromhex(each) for each in heard]
    too_much = [
        each
        for each in said
        if (len(each) > _NONCE_BYTES and not each.startswith(_TLS)) or (secret and secret in each)
    ]
    counts = f"{len(said)} connections came to {len(ports)} ports; {len(too_much)} said too much"
    detail = "; ".join([f"killed {router['pid']}", counts, *(repr(each[:40]) for each in too_much[:5])])
    return Finding(
        name, not too_much and is_whole, detail + ("" if is_whole else "; the server did not recover")
    )


async def _ask(port: int, said: bytes) -> tuple[int, bytes]:
    """Returns what it answers within a second."""
    answer = b""
    with contextlib.suppress(OSError, TimeoutError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(said)
            async with asyncio.timeout(1):
                while piece := await reader.read(1 << 16):
                    answer += piece
        finally:
            writer.transport.abort()
    return port, answer


async def _processes(http: httpx2.AsyncClient) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await http.get("/v1/cluster")).json().get("processes", [])
    return found


async def _until_whole(http: httpx2.AsyncClient, num_processes: int, killed: int, limit_s: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while True:
                found = await _processes(http)
                if len(found) == num_processes and all(
                    each["state"] == "up" and each["pid"] != killed for each in found
                ):
                    return True
                await asyncio.sleep(0.1)
    return False


def _ray_token(pid: int) -> bytes:
    with open(f"/proc/{pid}/environ", "rb") as file:
        pairs = [each.partition(b"=") for each in file.read().split(b"\0")]
    return next((value for name, _, value in pairs if name == b"RAY_AUTH_TOKEN"), b"")


def _impersonate(ports: Iterable[int], seconds: float) -> list[str]:
    """Returns what these ports received, in hex, one entry per connection. It answers like a router might."""
    end_s, wanted, heard = time.monotonic() + seconds, set(ports), dict[socket.socket, bytes]()
    selector = selectors.DefaultSelector()
    while time.monotonic() < end_s:
        for port in list(wanted):
            with contextlib.suppress(OSError):
                listener = socket.create_server(("127.0.0.1", port), backlog=64)
                selector.register(listener, selectors.EVENT_READ, "listener")
                wanted.discard(port)
        for key, _ in selector.select(0.01):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            if key.data == "listener":
                caller, _ = sock.accept()
                caller.setblocking(False)
                selector.register(caller, selectors.EVENT_READ, "caller")
                heard[caller] = b""
                with contextlib.suppress(OSError):
                    caller.send(_FORGED)
            elif piece := _read(sock):
                heard[sock] += piece
            else:
                selector.unregister(sock)
    return [each.hex() for each in heard.values()]


def _read(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1 << 16)
    except OSError:
        return b""
