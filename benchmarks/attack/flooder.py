"""Floods a server from a process of its own, for some seconds, and prints what it sent:

python -m benchmarks.attack.flooder KIND HOST PORT KEY SECONDS
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from random import Random
from typing import Any

from alignedserve.gateway.http.connections import allow_descriptors

NUM_THREADS, NICENESS = 32, 5
# Calls per second, and connections that a flood opens and keeps, at most. More would take the server's own cores here.
MAX_RATE, MAX_OPEN = 1500, 3000
LONG = "the same words again and again " * 100


class Flood:
    def __init__(self, kind: str, address: tuple[str, int], key: str, seconds: float) -> None:
        self._send: Callable[[int], None] = getattr(self, f"_send_{kind}")
        self._max_turns = MAX_OPEN if kind == "connections" else sys.maxsize
        self._address = address
        self._key = key
        self._begin_s = time.monotonic()
        self._end_s = self._begin_s + seconds
        self._numbers = count()
        self._kept: list[socket.socket] = []
        self.num_sent = self.num_failed = 0

    def run(self) -> None:
        threads = [threading.Thread(target=self._send_on) for _ in range(NUM_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        time.sleep(max(self._end_s - time.monotonic(), 0.0))
        for each in self._kept:
            each.close()

    def _send_on(self) -> None:
        for number in self._turns():
            try:
                self._send(number)
                self.num_sent += 1
            except OSError:
                self.num_failed += 1

    def _turns(self) -> Iterator[int]:
        while time.monotonic() < self._end_s and (number := next(self._numbers)) < self._max_turns:
            time.sleep(max(self._begin_s + number / MAX_RATE - time.monotonic(), 0.0))
            yield number

    # ---- kinds ----

    def _send_cancels(self, number: int) -> None:
        """Sends a whole call, and hangs up after up to 20 ms."""
        with self._connected(prompt=LONG, max_tokens=64, stream=True):
            time.sleep(Random(number).random() * 0.02)

    def _send_connections(self, number: int) -> None:
        """Opens a connection and keeps it without a word."""
        self._kept.append(socket.create_connection(self._address, 5))

    def _send_calls(self, number: int) -> None:
        self._answer(prompt="Count from 1 to 9.", max_tokens=8, ignore_eos=True)

    def _send_choices(self, number: int) -> None:
        self._answer(prompt="once upon a time", n=256, max_tokens=400, ignore_eos=True)

    def _send_sessions(self, number: int) -> None:
        self._answer(prompt=f"chat {number} of many", max_tokens=1, session=f"session {number}")

    def _send_schemas(self, number: int) -> None:
        properties = {f"p{number}_{each}": {"type": "string", "maxLength": 9} for each in range(40)}
        schema = {"type": "object", "properties": properties, "additionalProperties": False}
        self._answer(prompt="x", max_tokens=1, structured_outputs={"json": schema})

    # ---- calls ----

    def _answer(self, **body: Any) -> None:
        """Reads the answer, and hangs up at the end of the flood."""
        with self._connected(**body) as sock:
            sock.settimeout(max(self._end_s - time.monotonic(), 0.1))
            while sock.recv(65536):
                pass

    def _connected(self, **body: Any) -> socket.socket:
        content = json.dumps({"model": "demo", **body}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._address[0]}\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {self._key}\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        sock = socket.create_connection(self._address, 10)
        sock.sendall(head.encode() + content)
        return sock


if __name__ == "__main__":
    os.nice(NICENESS)
    allow_descriptors(MAX_OPEN)
    kind, host, port, key, seconds = sys.argv[1:]
    flood = Flood(kind, (host, int(port)), key, float(seconds))
    flood.run()
    print(f"{flood.num_sent} sent, {flood.num_failed} failed", flush=True)
