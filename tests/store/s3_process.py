"""A real server with S3's protocol for tests, on loopback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from urllib.request import Request

BUCKET = "files"
_START_S = 60.0


class S3Process:
    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            self.port = sock.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> Mapping[str, str]:
        """What a process needs to know to use it."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": "a-secret-of-someone",
        }

    def start(self) -> None:
        """It begins with an empty bucket."""
        words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(words, stdout=quiet, stderr=quiet, start_new_session=True)
        give_up_s = time.monotonic() + _START_S
        while True:
            try:
                self.ask("PUT", f"/{BUCKET}")
                return
            except urllib.error.URLError:
                assert self._process.poll() is None and time.monotonic() < give_up_s, "it does not start"
                time.sleep(0.05)

    def kill(self) -> None:
        assert self._process
        self._process.kill()
        self._process.wait()
        self._process = None

    def pause(self) -> None:
        """It hangs from here on."""
        assert self._process
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process
        self._process.send_signal(signal.SIGCONT)

    def put(self, key: str, data: bytes) -> None:
        self.ask("PUT", f"/{BUCKET}/{key}", data)

    def unfinished(self) -> int:
        """Returns how many uploads in parts are neither complete nor aborted."""
        return self.ask("GET", f"/{BUCKET}?uploads").count(b"<UploadId>")

    def keys(self) -> list[str]:
        found = self.ask("GET", f"/{BUCKET}?list-type=2").decode()
        return [each.partition("</Key>")[0] for each in found.split("<Key>")[1:]]

    def empty(self) -> None:
        """Starts the server if it was killed, and leaves nothing in it."""
        if self._process is None:
            self.start()
            return
        self.ask("POST", "/moto-api/reset")
        self.ask("PUT", f"/{BUCKET}")

    def ask(self, method: str, path: str, data: bytes | None = None) -> bytes:
        url = f"http://127.0.0.1:{self.port}{path}"
        # an address of this machine needs no proxy
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        # It looks whether there is a signature, and not at what it says.
        headers = {"Content-Type": "application/octet-stream", "Authorization": "AWS someone:signed"}
        with opener.open(Request(url, data, headers, method=method), timeout=20) as answer:
            found: bytes = answer.read()
            return found

    def end(self) -> None:
        if self._process:
            with suppress(ProcessLookupError):
                self.go_on()
            self.kill()


@contextmanager
def s3_running() -> Iterator[S3Process]:
    """This process's environment names it in the block."""
    server = S3Process()
    before = {name: os.environ.get(name) for name in server.environment}
    os.environ.update(server.environment)
    try:
        server.start()
        yield server
    finally:
        server.end()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value
