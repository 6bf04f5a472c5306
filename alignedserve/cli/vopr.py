"""`alignedserve dev vopr`: deterministic simulation testing, with faults of every kind, from seeds."""

from __future__ import annotations

import logging
import os
import random
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from alignedserve.cli.command import Command, did_you_mean
from alignedserve.cli.options import writing

if TYPE_CHECKING:
    from alignedserve.vopr.history import History
    from alignedserve.vopr.plan import Plan

# Seconds between two progress lines.
_PROGRESS_S = 5.0

# At most this long is a failure shrunk, so that a run that is bounded in time tells what failed.
_SHRINK_S = 300.0


@click.command("vopr", cls=Command)
@click.option("--seed", type=int, help="replay this seed, step by step [default: run new seeds]")
@click.option("--minutes", type=float, default=1.0, show_default=True, help="minutes for which new seeds run")
@click.option("--first-seed", type=int, help="first of the new seeds; the others follow it [default: random]")
@click.option(
    "--policy", multiple=True, metavar="POLICY", help="run only this policy; repeat for more [default: all]"
)
@click.option(
    "--system",
    multiple=True,
    metavar="[island|whole]",
    help="island: one island with simulated gateways; whole: islands behind real gateways, with batch jobs and a "
    "store; repeat for both [default: both]",
)
@click.option(
    "--aim",
    multiple=True,
    help="with --seed: what faults are aimed at, as a failure report prints it; repeat for more",
)
@click.option(
    "--history",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="replay this file, which a failure has written",
)
@click.option("--jobs", type=int, help="number of processes that run seeds [default: one per core]")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("."),
    show_default=True,
    help="directory for event logs and for the shrunk history of a failure",
)
@click.option("--shrink/--no-shrink", default=True, help="look for a shorter history that still fails")
def command(
    seed: int | None,
    minutes: float,
    first_seed: int | None,
    policy: tuple[str, ...],
    system: tuple[str, ...],
    aim: tuple[str, ...],
    history: Path | None,
    jobs: int | None,
    out: Path,
    shrink: bool,
) -> None:
    """Check random systems with faults in virtual time.

    A seed makes an island of router, pool and instances. Some seeds make a whole system: several islands, gateways,
    batch jobs, a store, and clients over HTTP.

    The exit status is 1 if an invariant failed. The last line is then the command that replays the failure.
    """
    from alignedserve.scheduling.policies import POLICIES
    from alignedserve.vopr.history import History
    from alignedserve.vopr.plan import SYSTEMS

    _check("policy", policy, POLICIES)
    _check("system", system, SYSTEMS)
    if aim and (seed is None or history):
        raise ValueError("aim: needs --seed, and no --history")
    choice = _Choice(policy, system)
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    if history:
        failed = _replay(History.load(history), history.stem, f"--history {history}", out, shrink=False)
    elif seed is not None:
        failed = _replay(choice.history(seed, aim), f"vopr-{seed}", choice.flags(seed, aim), out, shrink)
    else:
        if first_seed is None:
            # New seeds for each run, short enough to be typed.
            first_seed = random.SystemRandom().randrange(10**9)
        failed = _search(first_seed, minutes, choice, jobs or os.cpu_count() or 1, out, shrink)
    if failed:
        sys.exit(1)


def _check(option: str, names: tuple[str, ...], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(
                f"{option}={name!r}: must be one of {', '.join(known)}{did_you_mean(name, known)}"
            )


@dataclass(frozen=True)
class _Choice:
    """The policies and kinds of system that seeds may use."""

    policies: tuple[str, ...]
    systems: tuple[str, ...]

    def plan(self, seed: int) -> Plan:
        from alignedserve.vopr.plan import make_plan

        return make_plan(seed, self.policies, self.systems)

    def history(self, seed: int, aims: Sequence[str]) -> History:
        from alignedserve.vopr.runs.run import history_of

        return history_of(seed, self.policies, self.systems, aims)

    def flags(self, seed: int, aims: Sequence[str]) -> str:
        policies = "".join(f" --policy {name}" for name in self.policies)
        systems = "".join(f" --system {name}" for name in self.systems)
        return f"--seed {seed}{policies}{systems}" + "".join(f" --aim {aim}" for aim in aims)


def _replay(history: History, name: str, flags: str, out: Path, shrink: bool) -> bool:
    """Replays a history. Returns whether it failed."""
    from alignedserve.vopr.event_logs import open_in
    from alignedserve.vopr.runs.run import run
    from alignedserve.vopr.tally import RunTally

    for field, value in vars_of(history):
        click.echo(f"{field:>24}  {value}")
    tally, begun_s = RunTally(), time.monotonic()
    outcome = run(history, open_in(out, name))
    tally.add(outcome)
    for line in tally.lines(time.monotonic() - begun_s):
        click.echo(line)
    click.echo(f"the routers' event logs, for alignedserve dev replay: {out / name}-router-*.events")
    if outcome.failure is None:
        return False
    click.echo(str(outcome.failure))
    if shrink:
        _shrink(history, out / f"{name}.json")
    click.echo(f"alignedserve dev vopr {flags}")
    return True


def vars_of(history: History) -> list[tuple[str, object]]:
    from msgspec.structs import asdict

    from alignedserve.vopr.history import kind_of

    kinds = [kind_of(action) for action in history.actions]
    counted = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    actions = ", ".join(f"{kind} {count}" for kind, count in counted.items())
    return [*asdict(history.plan).items(), ("actions", actions)]


def _shrink(history: History, path: Path) -> None:
    from alignedserve.vopr.runs.shrink import Shrinker

    # Each run would repeat the logs of the simulated processes.
    logging.disable()
    shrinker = Shrinker(history, max_s=_SHRINK_S)
    shortest = shrinker.shrink()
    with writing(path):
        shortest.save(path)
    click.echo(f"{len(history.actions)} actions, shrunk to {len(shortest.actions)}: {shrinker.failure}")
    for action in shortest.actions:
        click.echo(f"  {action}")
    click.echo(f"alignedserve dev vopr --history {path}")


def _search(first_seed: int, minutes: float, choice: _Choice, num_jobs: int, out: Path, shrink: bool) -> bool:
    from alignedserve.vopr.runs.search import Tried, search
    from alignedserve.vopr.tally import RunTally

    tally, begun_s, failures = RunTally(), time.monotonic(), list[Tried]()
    told_s = begun_s

    def told(tried: Tried) -> None:
        nonlocal told_s
        tally.add(tried.outcome)
        if tried.outcome.failure:
            failures.append(tried)
        if time.monotonic() - told_s > _PROGRESS_S:
            told_s = time.monotonic()
            click.echo(next(tally.lines(told_s - begun_s)), err=True)

    search(first_seed, minutes, choice.plan, choice.history, num_jobs, told)
    for line in tally.lines(time.monotonic() - begun_s):
        click.echo(line)
    if not failures:
        return False
    for each in failures[1:]:
        click.echo(f"{each.outcome.failure}\nalignedserve dev vopr {choice.flags(each.seed, each.aims)}")
    seed, aims = failures[0].seed, failures[0].aims
    return _replay(choice.history(seed, aims), f"vopr-{seed}", choice.flags(seed, aims), out, shrink)
