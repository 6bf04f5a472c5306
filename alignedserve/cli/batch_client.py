"""A client of the Files and Batches API."""

from __future__ import annotations

import json
import re
import time
from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import httpx2

from alignedserve.cli.command import WrongOption
from alignedserve.cli.http import away, http_client, refusal
from alignedserve.cli.options import writing
from alignedserve.cli.output_file import whole_file
from alignedserve.cli.progress import bar

Json = dict[str, Any]

# Seconds between two requests for the state of a batch.
_POLL_S = 0.5
# Seconds for which the server may be unreachable, for instance during a restart.
_PATIENCE_S = 120.0
# Ids consist of these, so an id never becomes another path.
_ID = re.compile(r"[\w-]+", re.ASCII)
_OVER = ("failed", "completed", "expired", "cancelled")


class BatchClient:
    def __init__(self, http: httpx2.Client) -> None:
        self._http = http

    def submit(self, source: Path, endpoint: str | None, completion_window: str) -> Json:
        endpoint = endpoint or _endpoint_of(source)
        with source.open("rb") as file:
            form = {"purpose": "batch"}
            uploaded = self._ask("POST", "/v1/files", data=form, files={"file": (source.name, file)})
        asked = {
            "input_file_id": uploaded["id"],
            "endpoint": endpoint,
            "completion_window": completion_window,
        }
        try:
            return self._ask("POST", "/v1/batches", json=asked)
        except ValueError:
            # The file of a batch that was refused is of no use.
            self._http.delete(f"/v1/files/{uploaded['id']}")
            raise

    def batch(self, batch_id: str) -> Json:
        return self._ask("GET", _path_of(batch_id))

    def batches(self, limit: int) -> list[Json]:
        found: list[Json] = self._ask("GET", "/v1/batches", params={"limit": limit})["data"]
        return found

    def cancel(self, batch_id: str) -> Json:
        return self._ask("POST", f"{_path_of(batch_id)}/cancel")

    def wait(self, batch: Json) -> Json:
        """Waits until the batch has ended, and returns it. A restart of the server does not interrupt the wait.

        A terminal gets a progress bar. Anything else gets one line per status of the batch.
        """
        last_answer_s = time.monotonic()
        last_status = ""
        with bar(None, batch["id"], "line") as shown:
            while True:
                counts = batch["request_counts"]
                num_done = counts["completed"] + counts["failed"]
                shown.total = counts["total"] or None
                shown.n = num_done
                shown.set_postfix_str(f"{batch['status']}, {counts['failed']} failed{_until(batch)}")
                if shown.disable and batch["status"] != last_status:
                    last_status = batch["status"]
                    lines = f"{num_done}/{counts['total']} lines, {counts['failed']} failed"
                    click.echo(f"{batch['id']}: {last_status}, {lines}", err=True)
                if batch["status"] in _OVER:
                    return batch
                time.sleep(_POLL_S)
                try:
                    batch = self.batch(batch["id"])
                    last_answer_s = time.monotonic()
                except ServerAway as error:
                    if time.monotonic() - last_answer_s > _PATIENCE_S:
                        raise click.ClickException(str(error)) from None

    def download(self, file_id: str, path: Path) -> int:
        """Downloads the file to `path`, and returns its number of bytes.

        A plain file gets the whole content or keeps its old one. A pipe or a device is written as data arrives
        (output_file.py).
        """
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
        except httpx2.TransportError as error:
            reason = error or type(error).__name__
            raise click.ClickException(f"{path}: the download of {file_id} is incomplete: {reason}") from None

    def _ask(self, method: str, path: str, **options: Any) -> Json:
        try:
            answer = self._http.request(method, path, **options)
        except httpx2.TransportError as error:
            raise ServerAway(away(self._http, error)) from None
        if answer.is_error:
            raise _failure(answer)
        found: Json = answer.json()
        return found


def estimate_of(batch: Json) -> str:
    """Returns the batch's progress and the server's estimate of its end; "" without an estimate."""
    said = batch.get("alignedserve") or {}
    at = said.get("estimated_completion_at")
    if at is None:
        return ""
    left_s = max(0, round(at - time.time()))
    left = f"{left_s} s" if left_s < 120 else f"{round(left_s / 60)} min"
    verdict = "" if at <= batch["expires_at"] else ", after its window has ended"
    return f"{said['progress']:.0%} done, {left} left, until {_clock(at)}{verdict}"


def _until(batch: Json) -> str:
    at = (batch.get("alignedserve") or {}).get("estimated_completion_at")
    return "" if at is None else f", until {_clock(at)}"


def _clock(at: float) -> str:
    """Returns the local time, with the date if it is not today."""
    when = time.localtime(at)
    is_today = when[:3] == time.localtime()[:3]
    return time.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M", when)


class ServerAway(click.ClickException):
    """The server can't be reached, perhaps only for a moment."""


def _failure(answer: httpx2.Response) -> Exception:
    """Returns ValueError for a value that is not allowed: a command names its own options in it."""
    kinds: dict[int, type[Exception]] = {400: ValueError, 503: ServerAway}
    return kinds.get(answer.status_code, click.ClickException)(refusal(answer))


def _endpoint_of(source: Path) -> str:
    """Returns the endpoint of the first line. Raises WrongOption."""
    with source.open("rb") as file:
        number, first = next(
            ((number, line) for number, line in enumerate(file, 1) if line.strip()), (0, b"")
        )
    if not number:
        raise WrongOption(f"{source}: is empty")
    try:
        return str(json.loads(first.removeprefix(BOM_UTF8).decode())["url"])
    except UnicodeDecodeError:
        problem = "is not UTF-8"
    except ValueError as error:
        problem = f"is not JSON: {error}"
    except (LookupError, TypeError):
        problem = "is not a request with a url"
    raise WrongOption(f"{source}: line {number} {problem}")


def _path_of(batch_id: str) -> str:
    """Returns the batch's path. Raises ClickException for what can't be an id, such as another path."""
    if not _ID.fullmatch(batch_id):
        raise click.ClickException(f"batch_id={batch_id!r}: there is no such batch")
    return f"/v1/batches/{batch_id}"


@contextmanager
def connected(url: str, api_key: str | None) -> Iterator[BatchClient]:
    with http_client(url, api_key) as http:
        yield BatchClient(http)
