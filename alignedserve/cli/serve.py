"""`alignedserve serve`: the whole system on this machine, or on a Ray cluster."""

from __future__ import annotations

from typing import Any

import click

from alignedserve.cli.options import options_of, taken
from alignedserve.config import EngineConfig
from alignedserve.gateway.limits import Limits
from alignedserve.launch.config import ServeConfig
from alignedserve.mix import MixConfig
from router.config import RouterConfig


@click.command("serve")
@click.argument("model", required=False)
@options_of(ServeConfig)
@options_of(Limits)
# its processes have no terminal to draw bars on
@options_of(EngineConfig, without=["use_tqdm"])
@options_of(RouterConfig)
@options_of(MixConfig)
def command(model: str | None, **options: Any) -> None:
    """Serve MODEL (the demo model if none is named) behind the OpenAI API."""
    from alignedserve import demo
    from alignedserve.launch.serve import serve

    if model is None:
        options["served_model_name"] = options["served_model_name"] or "demo"
    engine = EngineConfig(model or str(demo.MODEL_DIR), **taken(EngineConfig, options))
    config = ServeConfig(**taken(ServeConfig, options))
    limits = Limits(**taken(Limits, options))
    mix = MixConfig(**taken(MixConfig, options))
    try:
        serve(engine, RouterConfig(**taken(RouterConfig, options)), config, limits, mix, _say)
    except RuntimeError as error:
        # PartFailed; imported by name it would bring ray into every --help
        raise click.ClickException(str(error)) from error


def _say(line: str) -> None:
    click.echo(line)
