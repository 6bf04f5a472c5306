"""`alignedserve serve`: the whole system on this machine, or on a Ray cluster."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import click

from alignedserve.cli.options import Command, options_of, taken
from alignedserve.engine.config import EngineConfig
from alignedserve.gateway.limits import Limits
from alignedserve.launch.config import ServeConfig
from alignedserve.router.config import RouterConfig
from alignedserve.scheduling.config import INTERNAL, SchedulingConfig


@dataclass(frozen=True)
class Configs:
    engine: EngineConfig
    router: RouterConfig
    serve: ServeConfig
    limits: Limits
    scheduling: SchedulingConfig


def serve_options(command: Command) -> Command:
    # its processes have no terminal to draw bars on
    for add in (
        options_of(SchedulingConfig, without=INTERNAL),
        options_of(RouterConfig),
        options_of(EngineConfig, without=["use_tqdm"]),
        options_of(Limits),
        options_of(ServeConfig),
    ):
        command = add(command)
    return click.argument("model", required=False)(command)


def configs_of(model: str | None, options: dict[str, Any]) -> Configs:
    """Raises ValueError for what is not allowed."""
    from alignedserve import demo

    if model is None:
        options = options | {"served_model_name": options["served_model_name"] or "demo"}
    return Configs(
        EngineConfig(model or str(demo.MODEL_DIR), **taken(EngineConfig, options)),
        RouterConfig(**taken(RouterConfig, options)),
        ServeConfig(**taken(ServeConfig, options)),
        Limits(**taken(Limits, options)),
        SchedulingConfig(**taken(SchedulingConfig, options)),
    )


@click.command("serve")
@serve_options
def command(model: str | None, **options: Any) -> None:
    """Serve MODEL (the demo model if none is named) behind the OpenAI API."""
    from alignedserve.launch.serve import serve

    asked = configs_of(model, options)
    try:
        serve(asked.engine, asked.router, asked.serve, asked.limits, asked.scheduling, _say)
    except RuntimeError as error:
        # ProcessFailed; imported by name it would bring ray into every --help
        raise click.ClickException(str(error)) from error


def _say(line: str) -> None:
    try:
        click.echo(line)
    except OSError:
        # The terminal has closed, or who read this has gone. Nobody hears the rest; the files of --log-dir have it.
        for number in (1, 2):
            _forget_output(number)


def _forget_output(number: int) -> None:
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), number)
