"""`alignedserve simulate`: runs traffic through a cluster in virtual time."""

from __future__ import annotations

import shlex
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import alignedserve
from alignedserve.cli.command import Command, did_you_mean
from alignedserve.cli.help_groups import SIMULATE
from alignedserve.cli.options import options_of, writing
from alignedserve.cli.output_file import OutputFile, write_json
from alignedserve.cli.simulate.config import SimConfig
from alignedserve.cli.simulate.progress import shown
from alignedserve.engine.choices import choose_max_model_len
from alignedserve.engine.config import EngineConfig
from alignedserve.launch.settings import Settings, taken
from alignedserve.router.config import RouterConfig
from alignedserve.scheduling.config import SchedulingConfig

if TYPE_CHECKING:
    from alignedserve.cli.simulate.compare import Comparison, Row
    from alignedserve.sim.model_kv import ModelKv
    from alignedserve.timing.cost import CostModel

_LIMITS = (
    *("max_num_seqs", "max_num_batched_tokens", "block_size", "hidden_cache", "kv_cache_dtype"),
    "enable_prefix_caching",
)
_OF_AN_ENGINE = {field.name for field in fields(EngineConfig)} - {*_LIMITS}
# The exit status of a program that was interrupted.
_SIGINT = 130


@click.command("simulate", cls=Command, groups=SIMULATE)
@click.argument("model", required=False)
@click.option("--output", type=OutputFile(), help="JSON file to write, with all settings and figures")
@click.option(
    "--plot", type=OutputFile(), help="PNG file to draw, with attainment, TTFT and gaps of each setting"
)
@options_of(SimConfig)
@options_of(EngineConfig, without=_OF_AN_ENGINE)
# Processes neither crash nor hang in the simulation.
@options_of(RouterConfig, without=["link", "orphan_s", "silence_s"], groups={"instances": "cluster"})
# `be_share` is a share of the traffic here: see be_min_share.
@options_of(SchedulingConfig, without=["policy", "be_share"], groups={"latency": "expert"})
def command(model: str | None, output: Path | None, plot: Path | None, **options: Any) -> None:
    """Simulate a cluster under a trace or synthetic traffic, and compare policies and numbers of instances.

    The scheduling is that of `serve`. A cost model gives the times of iterations and copies.

    MODEL is the model of --cost: a directory, a hub name or a preset. Only its config is read. It is needed for
    --kv-cache-dtype and for models with sliding-window layers.
    """
    from alignedserve.bench.figure import figure_class
    from alignedserve.cli.simulate.compare import Comparison
    from alignedserve.cli.simulate.plot import draw
    from alignedserve.cli.simulate.table import remarks, tables
    from alignedserve.cli.simulate.verdict import verdict

    if plot:
        figure_class()
    config = SimConfig(**taken(SimConfig, options))
    router = RouterConfig(
        **{name: value for name, value in taken(RouterConfig, options).items() if name != "link"}
    )
    told = {**taken(SchedulingConfig, options), "policy": config.policy[0], "be_share": config.be_min_share}
    scheduling = SchedulingConfig(**told)
    told_of_engine = {name: options[name] for name in _LIMITS}
    engine = EngineConfig(model or "simulated", max_model_len=config.max_model_len, **told_of_engine)
    kv = model_kv(engine, scheduling) if model else None
    comparison = Comparison(config, load_cost(config.cost), engine, router, scheduling, kv)
    rows: list[Row] = []
    is_whole = _collect(comparison, rows)
    click.echo(_head(config, comparison))
    for line in (*tables(rows), "", *remarks(rows)):
        click.echo(line)
    if found := verdict(rows, config.attainment):
        click.echo(found)
    if output:
        _save(output, {"model": model, **options}, comparison, rows, is_whole)
    if plot and any(row.outcome for row in rows):
        with writing(plot):
            draw(rows, plot)
    if not is_whole:
        sys.exit(_SIGINT)
    if any(row.outcome is None or row.outcome.num_open for row in rows):
        sys.exit(1)


def model_kv(engine: EngineConfig, scheduling: SchedulingConfig) -> ModelKv:
    """Returns the KV layout of a model. It reads the config but no weights. Raises ValueError."""
    from alignedserve import demo
    from alignedserve.models.locate import locate_model
    from alignedserve.sim.model_kv import ModelKv

    config = locate_model(demo.directory_of(engine.model), load_format="dummy").config
    settings = Settings(replace(engine, kv_cache_dtype="auto"), scheduling=scheduling)
    return ModelKv(
        engine.model,
        settings.block_format(config, config.dtype),
        choose_max_model_len(engine, config),
        config.window,
        settings.layer_groups(config),
    )


def load_cost(name: str) -> CostModel:
    """Returns a cost model by name, or from a file of `alignedserve profile`."""
    from alignedserve.timing.cost_presets import cost_presets, load_cost_model

    path = Path(name)
    if name in cost_presets():
        return cost_presets()[name]
    if not path.is_file():
        known = ", ".join(sorted(cost_presets()))
        raise ValueError(
            f"cost={name!r}: must be a JSON file or one of {known}{did_you_mean(name, cost_presets())}"
        )
    if b'"facts"' in (data := path.read_bytes()):
        from alignedserve.instance.profile.saved import decode

        cost = decode(data, name).cost
        if cost.has_free_copies:
            click.echo(f"{name} has no copy times: copies of KV take no time. Profile again", err=True)
        return cost
    return load_cost_model(name)


def _collect(comparison: Comparison, rows: list[Row]) -> bool:
    """Appends a row for each setting. Returns False if it was interrupted."""
    try:
        with shown() as progress:
            for row in comparison.rows(progress):
                rows.append(row)
    except KeyboardInterrupt:
        click.echo(f"Interrupted: {len(rows)} of {len(comparison.settings)} settings were done", err=True)
        return False
    return True


def _head(config: SimConfig, comparison: Comparison) -> str:
    traffic = comparison.workload.traffic
    num_tokens = sum(each.lengths.prompt for each in traffic), sum(each.lengths.output for each in traffic)
    backlog = f", beside {config.be_backlog} best-effort requests all the time" if config.be_backlog else ""
    left_out = comparison.num_too_long and (
        f"\n{comparison.num_too_long} more are left out: longer than max_model_len={comparison.max_model_len}"
    )
    return (
        f"{config.cost}: {len(traffic)} requests of {num_tokens[0] / len(traffic):.0f} tokens in and "
        f"{num_tokens[1] / len(traffic):.0f} out, on average{backlog}{left_out or ''}"
    )


def _save(
    path: Path, options: dict[str, Any], comparison: Comparison, rows: list[Row], is_whole: bool
) -> None:
    found = {
        "version": alignedserve.__version__,
        "command": shlex.join(["alignedserve", *sys.argv[1:]]),
        "settings": options,
        "max_model_len": comparison.max_model_len,
        "num_requests": len(comparison.workload.traffic),
        "num_too_long": comparison.num_too_long,
        "is_whole": is_whole,
        "rows": [row.as_dict() for row in rows],
    }
    with writing(path):
        write_json(path, found)
