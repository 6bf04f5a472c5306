"""The Files and Batches API as the commands use it, and a server for one of them."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import click
import httpx
from tqdm import tqdm

from alignedserve.cli.http import http_client, refusal
from alignedserve.cli.options import writing
from alignedserve.cli.output_file import whole_file

Json = dict[str, Any]

_POLL_S = 0.5
# The seconds for which a server may be away, for instance because it is started again.
_PATIENCE_S = 120.0
_OVER = ("failed", "completed", "expired", "cancelled")


class BatchClient:
    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def submit(self, source: Path, endpoint: str | None, completion_window: str) -> Json:
        with source.open("rb") as file:
            form = {"purpose": "batch"}
            uploaded = self._ask("POST", "/v1/files", data=form, files={"file": (source.name, file)})
        asked = {
            "input_file_id": uploaded["id"],
            "endpoint": endpoint or _endpoint_of(source),
            "completion_window": completion_window,
        }
        return self._ask("POST", "/v1/batches", json=asked)

    def batch(self, batch_id: str) -> Json:
        return self._ask("GET", f"/v1/batches/{batch_id}")

    def batches(self, limit: int) -> list[Json]:
        found: list[Json] = self._ask("GET", "/v1/batches", params={"limit": limit})["data"]
        return found

    def cancel(self, batch_id: str) -> Json:
        return self._ask("POST", f"/v1/batches/{batch_id}/cancel")

    def wait(self, batch: Json) -> Json:
        """Waits until the batch is over, with a progress bar, and across restarts of the server."""
        last_heard_s = time.monotonic()
        with tqdm(total=None, unit="line", desc=batch["id"]) as bar:
            while True:
                counts = batch["request_counts"]
                bar.total = counts["total"] or None
                bar.n = counts["completed"] + counts["failed"]
                bar.set_postfix_str(f"{batch['status']}, {counts['failed']} failed{_until(batch)}")
                if batch["status"] in _OVER:
                    return batch
                time.sleep(_POLL_S)
                try:
                    batch = self.batch(batch["id"])
                    last_heard_s = time.monotonic()
                except ServerAway as error:
                    if time.monotonic() - last_heard_s > _PATIENCE_S:
                        raise click.ClickException(str(error)) from None

    def download(self, file_id: str, path: Path) -> int:
        """Downloads the file to `path`, and returns how many bytes it has. A plain file gets all of it or is left as
        it was; what else there is, such as a pipe or a device, gets what comes (output_file.py)."""
        try:
            with (
                self._http.stream("GET", f"/v1/files/{file_id}/content") as answer,
                writing(path),
                whole_file(path) as file,
            ):
                if answer.is_error:
                    answer.read()
                    raise _failure(answer)
                return sum(file.write(piece) for piece in answer.iter_bytes())
        except httpx.TransportError as error:
            reason = error or type(error).__name__
            raise click.ClickException(f"{path}: {file_id} has not come completely: {reason}") from None

    def _ask(self, method: str, path: str, **options: Any) -> Json:
        try:
            answer = self._http.request(method, path, **options)
        except httpx.TransportError as error:
            raise ServerAway(f"{self._http.base_url}: {error or type(error).__name__}") from None
        if answer.is_error:
            raise _failure(answer)
        found: Json = answer.json()
        return found


def estimate_of(batch: Json) -> str:
    """Returns how far the batch is and when it will be done, as the server estimates it; "" if it does not say."""
    said = batch.get("alignedserve") or {}
    at = said.get("estimated_completion_at")
    if at is None:
        return ""
    left_s = max(0, round(at - time.time()))
    left = f"{left_s} s" if left_s < 120 else f"{round(left_s / 60)} min"
    verdict = "" if at <= batch["expires_at"] else ", which is after its window"
    return f"{said['progress']:.0%} done, {left} left, until {_clock(at)}{verdict}"


def _until(batch: Json) -> str:
    at = (batch.get("alignedserve") or {}).get("estimated_completion_at")
    return "" if at is None else f", until {_clock(at)}"


def _clock(at: float) -> str:
    """Returns the time of the day here, with the date if that is another day."""
    when = time.localtime(at)
    is_today = when[:3] == time.localtime()[:3]
    return time.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M", when)


class ServerAway(click.ClickException):
    """The server can't be reached, but may be back in a moment."""


def _failure(answer: httpx.Response) -> click.ClickException:
    return ServerAway(refusal(answer)) if answer.status_code == 503 else click.ClickException(refusal(answer))


def _endpoint_of(source: Path) -> str:
    with source.open("rb") as file:
        first = next((line for line in file if line.strip()), b"")
    try:
        return str(json.loads(first)["url"])
    except (ValueError, KeyError, TypeError):
        raise click.ClickException(f"{source}: its first line is not a request with a url") from None


@contextmanager
def connected(url: str, api_key: str | None) -> Iterator[BatchClient]:
    with http_client(url, api_key) as http:
        yield BatchClient(http)


@contextmanager
def own_server(options: Sequence[str], say: Callable[[str], None]) -> Iterator[str]:
    """Starts a server with a state of its own and yields its URL; both are gone afterwards."""
    from alignedserve.launch.ports import free_port

    port = free_port("127.0.0.1")
    with tempfile.TemporaryDirectory(prefix="batch-", dir="/tmp") as state:
        # What goes well in the server is not what the user has asked for, unless they say so.
        quiet, own = ["--log-level", "warning"], ["--port", str(port), "--state-dir", state]
        command = [sys.executable, "-m", "alignedserve", "serve", *quiet, *options, *own]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        try:
            assert process.stdout
            _until_ready(process.stdout, say)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


def _until_ready(output: IO[str], say: Callable[[str], None]) -> None:
    """Returns when the server is ready. Later output of the server is passed on as well."""
    ready: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def read() -> None:
        for line in output:
            say(line.rstrip())
            if "ready after" in line:
                ready.put(True)
        ready.put(False)

    threading.Thread(target=read, daemon=True).start()
    if not ready.get():
        raise click.ClickException("the server has not started")
