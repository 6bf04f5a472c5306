"""`alignedserve batch`: files of requests to files of answers, by a server that runs or by one of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from tqdm import tqdm

from alignedserve.cli.output_file import OutputFile, is_replaced

if TYPE_CHECKING:
    from alignedserve.cli.batch_client import BatchClient

DEFAULT_URL = "http://127.0.0.1:8000"
INPUT = click.Path(exists=True, dir_okay=False, path_type=Path)
OUTPUT = OutputFile()

Command = Callable[..., Any]


def server_options(default_url: str | None) -> Callable[[Command], Command]:
    def add(command: Command) -> Command:
        command = click.option("--api-key", envvar="OPENAI_API_KEY", help="[env: OPENAI_API_KEY]")(command)
        text = "of the server" if default_url else "of a server that runs [default: one is started]"
        return click.option("--url", default=default_url, show_default=bool(default_url), help=text)(command)

    return add


def job_options(command: Command) -> Command:
    command = click.option(
        "--completion-window", default="24h", show_default=True, help="from 10m to 7d: the job's deadline"
    )(command)
    text = "of the requests [default: the first line's]"
    return click.option("--endpoint", help=text)(command)


@click.group("batch")
def command() -> None:
    """Run files of requests as batch jobs."""


@command.command("run", context_settings={"ignore_unknown_options": True})
@click.option("-i", "--input", "source", type=INPUT, required=True, help="requests, a line of JSON each")
@click.option("-o", "--output", type=OUTPUT, required=True, help="where the answers go")
@click.option("-e", "--errors", type=OUTPUT, help="where errors go [default: the output, and .errors]")
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
    """Answer all of a file and wait for it.

    Without --url a server is started for it, and SERVE_OPTIONS, a model among them, are those of `alignedserve serve`.
    """
    from alignedserve.cli.batch_client import connected, own_server

    _check_places(source, output, errors)
    if url and serve_options:
        raise click.UsageError(f"{' '.join(serve_options)}: unknown; only a server of its own takes options")
    if url is not None:
        with connected(url, api_key) as client:
            _run(client, source, output, errors, endpoint, completion_window)
        return
    with own_server(serve_options, _say) as own_url, connected(own_url, api_key) as client:
        _run(client, source, output, errors, endpoint, completion_window)


@command.command("submit")
@click.argument("source", type=INPUT)
@click.option("--wait", is_flag=True, help="until it is over")
@job_options
@server_options(DEFAULT_URL)
def submit(
    source: Path, wait: bool, endpoint: str | None, completion_window: str, url: str, api_key: str | None
) -> None:
    """Upload a file of requests, make a batch of it, and print its id."""
    from alignedserve.cli.batch_client import connected

    with connected(url, api_key) as client:
        batch = client.submit(source, endpoint, completion_window)
        click.echo(batch["id"])
        if wait:
            _check_completed(client.wait(batch))


@command.command("status")
@click.argument("batch_id")
@click.option("--wait", is_flag=True, help="until it is over")
@server_options(DEFAULT_URL)
def status(batch_id: str, wait: bool, url: str, api_key: str | None) -> None:
    """Print the batch, as the server describes it, and when it will be done."""
    from alignedserve.cli.batch_client import connected, estimate_of

    with connected(url, api_key) as client:
        batch = client.batch(batch_id)
        batch = client.wait(batch) if wait else batch
        click.echo(json.dumps(batch, indent=2, ensure_ascii=False))
        if estimate := estimate_of(batch):
            _say(estimate)


@command.command("list")
@click.option("--limit", type=click.IntRange(1, 100), default=20, show_default=True)
@server_options(DEFAULT_URL)
def list_command(limit: int, url: str, api_key: str | None) -> None:
    """Print the newest batches, a line each."""
    from alignedserve.cli.batch_client import connected

    with connected(url, api_key) as client:
        for batch in client.batches(limit):
            counts = batch["request_counts"]
            done = f"{counts['completed']}+{counts['failed']}/{counts['total']}"
            click.echo(f"{batch['id']}  {batch['status']:<11}  {done:>17}  {batch['endpoint']}")


@command.command("cancel")
@click.argument("batch_id")
@click.option("--wait", is_flag=True, help="until it is over")
@server_options(DEFAULT_URL)
def cancel(batch_id: str, wait: bool, url: str, api_key: str | None) -> None:
    """Cancel a batch; what is answered stays."""
    from alignedserve.cli.batch_client import connected

    with connected(url, api_key) as client:
        batch = client.cancel(batch_id)
        click.echo((client.wait(batch) if wait else batch)["status"])


@command.command("results")
@click.argument("batch_id")
@click.option("-o", "--output", type=OUTPUT, required=True, help="where the answers go")
@click.option("-e", "--errors", type=OUTPUT, help="where errors go [default: the output, and .errors]")
@click.option("--wait", is_flag=True, help="until it is over")
@server_options(DEFAULT_URL)
def results(
    batch_id: str, output: Path, errors: Path | None, wait: bool, url: str, api_key: str | None
) -> None:
    """Download what a batch that is over has answered."""
    from alignedserve.cli.batch_client import connected

    _check_places(None, output, errors)
    with connected(url, api_key) as client:
        batch = client.batch(batch_id)
        if wait:
            batch = client.wait(batch)
        if not batch["output_file_id"] and not batch["error_file_id"]:
            raise click.ClickException(f"batch {batch_id} is {batch['status']}, and has no results")
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
    """Raises UsageError where one file would be written over another, or can't have its name."""
    places = [output, errors or _beside(output)]
    for place in places:
        try:
            place.lstat()
        except FileNotFoundError:
            continue
        except OSError as error:
            hint = "" if place in (output, errors) else ": --errors has to say where errors go"
            raise click.UsageError(f"{place}: {error.strerror}{hint}") from None
    if errors is None and not is_replaced(output):
        raise click.UsageError(f"{output} is no plain file: --errors has to say where errors go")
    plain = [each.resolve() for each in places if is_replaced(each)]
    if len(set(plain)) < len(plain):
        raise click.UsageError(f"{output}: answers and errors must go to different files")
    if source is not None and source.resolve() in plain:
        raise click.UsageError(f"{source}: is the input, and would be written over")


def _beside(output: Path) -> Path:
    """Returns where errors go unless they are told."""
    return output.parent / f"{output.name}.errors"


def _check_completed(batch: dict[str, Any]) -> None:
    problems = (batch["errors"] or {"data": []})["data"]
    for each in problems:
        _say(f"line {each['line']}: {each['message']}" if each["line"] else each["message"])
    if batch["status"] != "completed":
        raise click.ClickException(f"batch {batch['id']} is {batch['status']}")
    if failed := batch["request_counts"]["failed"]:
        raise click.ClickException(f"{failed} of {batch['request_counts']['total']} lines failed")


def _say(line: str) -> None:
    # Above a progress bar, where there is one.
    tqdm.write(line, file=sys.stderr)
