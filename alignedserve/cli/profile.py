"""`alignedserve profile`: measures how long iterations take on this device, for the cost model of `serve`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from alignedserve.cli.command import OneOf
from alignedserve.cli.help_groups import PROFILE
from alignedserve.cli.options import EngineCommand, engine_options
from alignedserve.cli.progress import bar, in_terminal
from alignedserve.engine.config import EngineConfig
from alignedserve.kv.format import POOL_KV_DTYPES, check_pool_kv_dtype

if TYPE_CHECKING:
    from alignedserve.instance.profile.saved import Profile
    from alignedserve.timing.cost import CostModel

_KINDS = {"decode": "decodes", "chunk": "prefill chunks", "both": "decodes beside a chunk"}


@click.command("profile", cls=EngineCommand, groups=PROFILE)
@click.argument("model", required=False)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.1),
    help="maximum seconds of measuring [default: 22, or 50 for a slow model]",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="file to write [default: the one that serve reads, in ~/.cache/alignedserve/profiles]",
)
@click.option(
    "--pool-kv-dtype",
    type=OneOf(tuple(POOL_KV_DTYPES)),
    default="auto",
    show_default=True,
    help="dtype of KV in the pool, as given to serve; it changes the time of copies",
)
@engine_options
def command(
    model: str | None, seconds: float | None, out: Path | None, pool_kv_dtype: str, **options: Any
) -> None:
    """Measure the iterations of MODEL and copies of its KV, fit the cost model, and save it.

    Without MODEL, the demo model is measured.
    """
    from dataclasses import replace

    from alignedserve import demo
    from alignedserve.engine.build import build_engine
    from alignedserve.instance.profile.copies import PoolEnd
    from alignedserve.instance.profile.facts import experts_of, facts_of
    from alignedserve.instance.profile.make import FULL, make
    from alignedserve.instance.profile.saved import default_path, locked, save
    from alignedserve.kvpool.segment import scratch_blocks

    config = EngineConfig(demo.directory_of(model), **in_terminal(options))
    check_pool_kv_dtype(pool_kv_dtype, config.kv_cache_dtype)
    built = build_engine(config)
    facts = facts_of(built, config, pool_kv_dtype)
    pool = PoolEnd(built.engine.format.in_pool(pool_kv_dtype), scratch_blocks)
    path = out or default_path(facts)
    effort = replace(FULL, budget_s=seconds, slow_budget_s=seconds) if seconds else FULL
    try:
        with locked(path):
            with _bar(config.use_tqdm) as progress:
                experts = experts_of(built.model_config)
                profile = make(built.engine, facts, effort, pool, progress, experts)
            save(path, profile)
    except OSError as error:
        raise click.ClickException(f"--out {path}: {error}") from error
    _print(profile, path)


class ProfileProgress(Protocol):
    def __call__(self, share: float) -> None: ...


@contextmanager
def _bar(is_shown: bool) -> Iterator[ProfileProgress]:
    with bar(100, "Measuring", "%", is_shown) as shown:

        def show(share: float) -> None:
            shown.update(round(100 * share) - shown.n)

        yield show


def _print_beside(cost: CostModel) -> None:
    """Prints the times of KV copies and of restoring KV, and what shared KV saves."""
    if not cost.has_free_copies:
        channels = cost.channels
        copies = {
            "to the pool": channels.save,
            "from the pool": channels.fetch,
            "from prefill": channels.admit,
        }
        click.echo("\n| a copy of KV | latency | GB/s |\n| --- | ---: | ---: |")
        for name, channel in copies.items():
            click.echo(f"| {name} | {1e6 * channel.latency_s:.0f} us | {channel.bytes_per_s / 1e9:.2f} |")
        click.echo("")
    if cost.restored_token_s:
        click.echo(f"Restoring KV from kept inputs takes {1e6 * cost.restored_token_s:.2f} us a token")
    if cost.shared_saving:
        click.echo(f"Reading shared KV once saves {cost.shared_saving:.0%} for each further decode")


def _print_errors(profile: Profile) -> None:
    click.echo("| error on held-out points | points | median | p95 |")
    click.echo("| --- | ---: | ---: | ---: |")
    for kind, error in profile.errors.items():
        click.echo(
            f"| {_KINDS[kind]} | {error.num_points} | {100 * error.median:.1f} % | {100 * error.p95:.1f} % |"
        )


def _print(profile: Profile, path: Path) -> None:
    from alignedserve.instance.profile.make import CROWDED_SHARE

    facts, cost = profile.facts, profile.cost
    click.echo(f"{facts['model']} in {facts['dtype']} on {facts['device']}: {profile.num_points} points\n")
    _print_errors(profile)
    fastest_s = cost.fastest_tbt_s(16), cost.fastest_ttft_s(128, profile.reach.max_chunk)
    click.echo(
        f"\nA token alone takes {1000 * fastest_s[0]:.2f} ms, a prompt of 128 {1000 * fastest_s[1]:.2f} ms"
    )
    _print_beside(cost)
    if profile.waited_share > CROWDED_SHARE:
        click.echo(
            f"Other processes used the cores for {100 * profile.waited_share:.0f} % of the time: "
            "profile again when the machine is idle"
        )
    click.echo(f"Saved as {path}")
