"""Clients of short calls, while something happens to the server."""

from __future__ import annotations

import threading

import httpx2

from tests.launch.server import NO_TLS, START_S


class Callers:
    """Short calls, one after the other: over a connection that is kept, and over a new one each."""

    def __init__(self, url: str) -> None:
        self.num_answered = 0
        self.failures: list[str] = []
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._call, args=(url, kept)) for kept in (True, False)]

    def __enter__(self) -> Callers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _call(self, url: str, is_kept: bool) -> None:
        body = {"model": "demo", "prompt": "Count from 1 to 4.", "max_tokens": 4, "temperature": 0}
        client = httpx2.Client(timeout=START_S, verify=NO_TLS)
        while not self._is_over.is_set():
            try:
                answer = client.post(f"{url}/v1/completions", json=body)
                self.num_answered += 1
                if answer.status_code != 200:
                    self.failures.append(answer.text)
            except httpx2.HTTPError as error:
                self.failures.append(repr(error))
            if not is_kept:
                client.close()
                client = httpx2.Client(timeout=START_S, verify=NO_TLS)
        client.close()
