"""Attacks over HTTP without a key: malformed requests, excessive data, and requests for other users' pages and
files."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import socket
from collections.abc import Iterable

import httpx2

from alignedserve.gateway.http.connections import allow_descriptors
from benchmarks.attack.target import Finding, Target

TIMEOUT_S = 8.0
NUM_IDLE = 2000
NUM_BODIES = 50
BODY_BYTES = 8 << 20
# The default of --max-total-body-bytes.
TOTAL_BYTES = 256 << 20
FILE_BYTES = 24 << 20


# ---- floods ----


async def attack_chunk_flood(target: Target) -> Finding:
    """Sends 960 KB of chunks of one byte."""
    status = await _status(target, [_head(target, "Transfer-Encoding: chunked"), b"1\r\n \r\n" * 160_000])
    return Finding("chunk flood", status == 400, f"status {status}")


async def attack_chunk_extension(target: Target) -> Finding:
    """Regular expressions that search for the end of the extension backtrack."""
    extension = b"1;" + b" " * 200_000 + b"\n\r\n \r\n"
    status = await _status(target, [_head(target, "Transfer-Encoding: chunked"), extension])
    return Finding("chunk extension", status == 400, f"status {status}")


async def attack_header_flood(target: Target) -> Finding:
    """Sends many headers, an endless one, and one that makes regular expressions backtrack."""
    begin = f"GET /health HTTP/1.1\r\nHost: {target.host}\r\n".encode()
    floods = {
        "many": [begin, b"a: b\r\n" * 200_000, b"\r\n"],
        "long": [begin, b"a: ", *[b"b" * 65536] * 100],
        "spaces": [begin, b"a: " + b" " * 250_000 + b"\x01\r\n\r\n"],
    }
    found = {name: await _status(target, sent) for name, sent in floods.items()}
    return Finding("header flood", set(found.values()) <= {400, 431}, str(found))


async def attack_tiny_segments(target: Target) -> Finding:
    """Sends a head and a body a byte at a time."""
    reader, writer = await asyncio.open_connection(target.host, target.port)
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    body = b'{"model": "nothing"}'
    try:
        for byte in _head(target, f"Content-Length: {len(body)}") + body:
            writer.write(bytes((byte,)))
            await asyncio.sleep(0.002)
        line = await asyncio.wait_for(reader.readline(), TIMEOUT_S * target.slack)
    finally:
        writer.close()
    return Finding("tiny segments", line.startswith(b"HTTP/1.1 4"), line.decode().strip())


# ---- what is kept open ----


async def attack_unfinished_bodies(target: Target) -> Finding:
    """Sends each body one piece short of 8 MiB, then nothing more. There are more of them than memory for bodies
    allows."""
    announced = _head(target, f"Content-Length: {BODY_BYTES}")
    sent = [announced, *[b" " * 65536] * (BODY_BYTES // 65536 - 1)]
    begun = [asyncio.create_task(_status(target, sent)) for _ in range(NUM_BODIES)]
    most_kept = TOTAL_BYTES // BODY_BYTES
    for answer in itertools.islice(asyncio.as_completed(begun), NUM_BODIES - most_kept):
        await answer
    # Those that are held wait for their last piece.
    found = [str(each.result()) if each.done() else "silence" for each in begun]
    for each in begun:
        each.cancel()
    await asyncio.gather(*begun, return_exceptions=True)
    counts = {each: found.count(each) for each in sorted(set(found))}
    num_refused = counts.get("503", 0)
    held = NUM_BODIES - num_refused <= most_kept and "200" not in counts
    return Finding("unfinished bodies", held, f"answers: {counts}")


async def attack_idle_connections(target: Target) -> Finding:
    """Opens as many connections as this process may, and then sends a normal request."""
    allow_descriptors(NUM_IDLE)
    kept: list[socket.socket] = []
    loop = asyncio.get_running_loop()
    try:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(TIMEOUT_S):
                for _ in range(NUM_IDLE):
                    kept.append(socket.socket())
                    kept[-1].setblocking(False)
                    await loop.sock_connect(kept[-1], (target.host, target.port))
        status = await _status(target, [f"GET /health HTTP/1.1\r\nHost: {target.host}\r\n\r\n".encode()])
    finally:
        for each in kept:
            each.close()
    return Finding("idle connections", status in (200, 503), f"{len(kept)} beside: status {status}")


# ---- what two readers could understand differently ----


async def attack_two_lengths(target: Target) -> Finding:
    """The second request is hidden in the first one's body for a reader that uses the length."""
    hidden = f"GET /v1/models HTTP/1.1\r\nHost: {target.host}\r\n\r\n".encode()
    both = _head(target, f"Content-Length: {5 + len(hidden)}\r\nTransfer-Encoding: chunked")
    got = await _talk(target, [both + b"0\r\n\r\n" + hidden])
    found = re.findall(rb"HTTP/1\.1 ([0-9]{3})", got)
    return Finding("Content-Length with Transfer-Encoding", found == [b"400"], f"statuses {found}")


# ---- pages of others ----


async def attack_foreign_pages(target: Target) -> Finding:
    """Sends requests as a browser would for a page that maps its own host name to this server's address, or submits a
    form."""
    form = {"purpose": (None, b"batch"), "file": ("x.jsonl", b"{}")}
    async with httpx2.AsyncClient(base_url=target.url, timeout=TIMEOUT_S * target.slack) as http:
        rebound = {"Host": f"evil.example:{target.port}"}
        found = {
            "list files": await http.get("/v1/files", headers=rebound),
            "page": await http.get("/", headers=rebound),
            "chat": await http.post("/v1/chat/completions", json={}, headers=rebound),
            "form": await http.post("/v1/files", files=form, headers={"Origin": "http://evil.example"}),
            "null": await http.post("/v1/files", files=form, headers={"Origin": "null"}),
            "port": await http.post("/v1/files", files=form, headers={"Origin": f"http://{target.host}:1"}),
            "no origin": await http.post("/v1/files", files=form, headers={"Sec-Fetch-Site": "cross-site"}),
        }
    statuses = {name: answer.status_code for name, answer in found.items()}
    return Finding("foreign pages", set(statuses.values()) == {403}, str(statuses))


# ---- files ----


async def attack_deleted_download(target: Target) -> Finding:
    """Deletes a file during a download. The client must notice that the download is incomplete."""
    form = {"purpose": (None, b"batch"), "file": ("x.jsonl", os.urandom(FILE_BYTES))}
    async with httpx2.AsyncClient(base_url=target.url, timeout=TIMEOUT_S * target.slack) as http:
        path = f"/v1/files/{(await http.post('/v1/files', files=form)).json()['id']}"
        reader, writer = await asyncio.open_connection(target.host, target.port, limit=4096)
        writer.write(f"GET {path}/content HTTP/1.1\r\nHost: {target.host}\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        # asyncio reads no more than its limit, so most of the file is still to come.
        await http.delete(path)
        try:
            async with asyncio.timeout(TIMEOUT_S * target.slack):
                num_bytes = 0
                while piece := await reader.read(1 << 20):
                    num_bytes += len(piece)
            detail, held = f"{num_bytes} of {FILE_BYTES} bytes, then the end", num_bytes < FILE_BYTES
        except ConnectionError as error:
            detail, held = f"{error}", True
        except TimeoutError:
            detail, held = f"no end {TIMEOUT_S * target.slack:g} s after {num_bytes} bytes", False
        finally:
            writer.close()
    return Finding("file deleted in mid-download", held, detail)


# ---- by hand ----


def _head(target: Target, headers: str) -> bytes:
    kind = "Content-Type: application/json"
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {target.host}\r\n{kind}\r\n{headers}\r\n\r\n".encode()
    )


async def _status(target: Target, sent: Iterable[bytes]) -> int | str:
    """Returns the status of the first answer, or what came instead of an answer."""
    got = await _talk(target, sent)
    found = re.match(rb"HTTP/1\.1 ([0-9]{3})", got)
    return int(found[1]) if found else got.decode(errors="replace") or "silence"


async def _talk(target: Target, sent: Iterable[bytes]) -> bytes:
    """Returns what is received while sending, and then until the server has been silent for a moment."""
    reader, writer = await asyncio.open_connection(target.host, target.port)
    got = bytearray()

    async def send() -> None:
        with contextlib.suppress(ConnectionError):
            for piece in sent:
                writer.write(piece)
                await writer.drain()

    sending = asyncio.create_task(send())
    try:
        async with asyncio.timeout(TIMEOUT_S * target.slack):
            while piece := await reader.read(65536):
                got += piece
                if got.endswith((b"}", b"\n")):
                    # There may be another answer.
                    async with asyncio.timeout(1.0):
                        got += await reader.read(65536)
                    break
    except TimeoutError:
        pass
    except ConnectionError as error:
        got = got or bytearray(str(error).encode())
    finally:
        sending.cancel()
        writer.close()
    return bytes(got)
