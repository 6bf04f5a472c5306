"""`alignedserve batch`: turns files of requests into files of answers, with a running server or one that it starts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from tqdm import tqdm

from alignedserve.cli.command import Group
from alignedserve.cli.output_file import OutputFile, is_replaced
from alignedserve.cli.own_server import WithServer, check_serve_options

if TYPE_CHECKING:
    from alignedserve.cli.batch_client import BatchClient

DEFAULT_URL = "http://127.0.0.1:8000"
INPUT = click.Path(exists=True, dir_okay=False, path_type=Path)
OUTPUT = OutputFile()

Decorated = Callable[..., Any]


def server_options(default_url: str | None) -> Callable[[Decorated], Decorated]:
    def add(command: Decorated) -> Decorated:
        text = "API key of the server [default: $OPENAI_API_KEY]"
        command = click.option("--api-key", envvar="OPENAI_API_KEY", help=text)(command)
        text = "URL of the server" if default_url else "URL of a running server [default: start one]"
        return click.option("--url", default=default_url, show_default=bool(default_url), help=text)(command)

    return add


def job_options(command: Decorated) -> Decorated:
    command = click.option(
        "--completion-window", default="24h", show_default=True, help="deadline of the job, from 10m to 7d"
    )(command)
    text = "endpoint of the requests [default: the one in the first line]"
    return click.option("--endpoint", help=text)(command)


@click.group("batch", cls=Group)
def command() -> None:
    """Run files of requests as batch jobs."""


@command.command("run", cls=WithServer, context_settings={"ignore_unknown_options": True})
@click.option(
    "-i", "--input", "source", type=INPUT, required=True, help="file of requests, one JSON object a line"
)
@click.option("-o", "--output", type=OUTPUT, required=True, help="file for the answers")
@click.option(
    "-e", "--errors", type=OUTPUT, help="file for errors [default: the output file's name and .errors]"
)
@job_options
@server_options(None)
@click.argument("serve_options", nargs=-1, type=click.UNPROCESSED)
def run(
    source: Path,
    output: Path,
    errors: Path | None,
    endpoint: str | None,
    completion_window: str,
    url: str | None,
    api_key: str | None,
    serve_options: tuple[str, ...],
) -> None:
    """Answer a file of requests, and wait until it is done.

    Without --url, this command starts a server and stops it at the end. SERVE_OPTIONS are the model and the options of
    `alignedserve serve`. The job is kept with --state-dir DIR: after a crash, a server with the same DIR resumes it.
    Without --state-dir, the server's files are temporary.
    """
    from alignedserve.cli.batch_client import connected
    from alignedserve.cli.own_server import own_server

    _check_places(source, output, errors)
    if url and serve_options:
        raise click.UsageError(f"{' '.join(serve_options)}: options of serve can't be combined with --url")
    if url is not None:
        with connected(url, api_key) as client:
            _run(client, source, output, errors, endpoint, completion_window)
        return
    check_serve_options(serve_options)
    with own_server(serve_options, _say) as own_url, connected(own_url, api_key) as client:
        _run(client, source, output, errors, endpoint, completion_window)


@command.command("submit")
@click.argument("source", type=INPUT)
@click.option("--wait", is_flag=True, help="wait until the batch has ended")
@job_options
@server_options(DEFAULT_URL)
def submit(
    source: Path, wait: bool, endpoint: str | None, completion_window: str, url: str, api_key: str | None
) -> None:
    """Upload a file of requests, create a batch, and print its id."""
    from alignedserve.cli.batch_client import connected

    with connected(url, api_key) as client:
        batch = client.submit(source, endpoint, completion_window)
        click.echo(batch["id"])
        if wait:
            _check_completed(client.wait(batch))


@command.command("status")
@click.argument("batch_id")
@click.option("--wait", is_flag=True, help="wait until the batch has ended")
@server_options(DEFAULT_URL)
def status(batch_id: str, wait: bool, url: str, api_key: str | None) -> None:
    """Print a batch as JSON, and when the server expects it to be done."""
    from alignedserve.cli.batch_client import connected, estimate_of

    with connected(url, api_key) as client:
        batch = client.batch(batch_id)
        batch = client.wait(batch) if wait else batch
        click.echo(json.dumps(batch, indent=2, ensure_ascii=False))
        if estimate := estimate_of(batch):
            _say(estimate)


@command.command("list")
@click.option("--limit", type=click.IntRange(1, 100), default=20, show_default=True, help="number of batches")
@server_options(DEFAULT_URL)
def list_command(limit: int, url: str, api_key: str | None) -> None:
    """Print the newest batches, one a line."""
    from alignedserve.cli.batch_client import connected

    with connected(url, api_key) as client:
        for batch in client.batches(limit):
            counts = batch["request_counts"]
            done = f"{counts['completed']}+{counts['failed']}/{counts['total']}"
            click.echo(f"{batch['id']}  {batch['status']:<11}  {done:>17}  {batch['endpoint']}")


@command.command("cancel")
@click.argument("batch_id")
@click.option("--wait", is_flag=True, help="wait until the batch has ended")
@server_options(DEFAULT_URL)
def cancel(batch_id: str, wait: bool, url: str, api_key: str | None) -> None:
    """Cancel a batch. Finished answers are kept."""
    from alignedserve.cli.batch_client import connected

    with connected(url, api_key) as client:
        batch = client.cancel(batch_id)
        click.echo((client.wait(batch) if wait else batch)["status"])


@command.command("results")
@click.argument("batch_id")
@click.option("-o", "--output", type=OUTPUT, required=True, help="file for the answers")
@click.option(
    "-e", "--errors", type=OUTPUT, help="file for errors [default: the output file's name and .errors]"
)
@click.option("--wait", is_flag=True, help="wait until the batch has ended")
@server_options(DEFAULT_URL)
def results(
    batch_id: str, output: Path, errors: Path | None, wait: bool, url: str, api_key: str | None
) -> None:
    """Download the answers of a batch that has ended."""
    from alignedserve.cli.batch_client import connected

    _check_places(None, output, errors)
    with connected(url, api_key) as client:
        batch = client.batch(batch_id)
        if wait:
            batch = client.wait(batch)
        if not batch["output_file_id"] and not batch["error_file_id"]:
            raise click.ClickException(f"batch {batch_id} is {batch['status']} and has no results")
        _download(client, batch, output, errors)


def _run(
    client: BatchClient,
    source: Path,
    output: Path,
    errors: Path | None,
    endpoint: str | None,
    completion_window: str,
) -> None:
    batch = client.wait(client.submit(source, endpoint, completion_window))
    _download(client, batch, output, errors)
    _check_completed(batch)


def _download(client: BatchClient, batch: dict[str, Any], output: Path, errors: Path | None) -> None:
    for file_id, path in (
        (batch["output_file_id"], output),
        (batch["error_file_id"], errors or _beside(output)),
    ):
        if file_id:
            _say(f"{path}: {client.download(file_id, path)} bytes")


def _check_places(source: Path | None, output: Path, errors: Path | None) -> None:
    """Raises UsageError if a file would overwrite another one, or if its name is not allowed."""
    places = [output, errors or _beside(output)]
    for place in places:
        try:
            place.lstat()
        except FileNotFoundError:
            continue
        except OSError as error:
            hint = "" if place in (output, errors) else ": name a file for errors with --errors"
            raise click.UsageError(f"{place}: {error.strerror}{hint}") from None
    if errors is None and not is_replaced(output):
        raise click.UsageError(f"{output} is not a plain file: name a file for errors with --errors")
    plain = [each.resolve() for each in places if is_replaced(each)]
    if len(set(plain)) < len(plain):
        raise click.UsageError(f"{output}: answers and errors must go to different files")
    if source is not None and source.resolve() in plain:
        raise click.UsageError(f"{source}: is the input, and would be overwritten")


def _beside(output: Path) -> Path:
    """Returns the default file for errors."""
    return output.parent / f"{output.name}.errors"


def _check_completed(batch: dict[str, Any]) -> None:
    problems = (batch["errors"] or {"data": []})["data"]
    for each in problems:
        _say(f"line {each['line']}: {each['message']}" if each["line"] else each["message"])
    if batch["status"] != "completed":
        raise click.ClickException(f"batch {batch['id']}: {batch['status']}")
    if failed := batch["request_counts"]["failed"]:
        raise click.ClickException(f"{failed} of {batch['request_counts']['total']} lines failed")


def _say(line: str) -> None:
    # Above the progress bar, if there is one.
    tqdm.write(line, file=sys.stderr)
