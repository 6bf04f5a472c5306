"""`alignedserve models`: the models that are on this machine, downloads and deletions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from alignedserve import demo
from alignedserve.cli.command import Group
from alignedserve.cli.progress import busy

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, HFCacheInfo


@dataclass(frozen=True)
class FoundModel:
    name: str
    # The size of the weights; 0: the model is not here.
    num_bytes: int
    place: str
    # Whether `serve` would have enough memory for it here: ok, warn or fail, as `doctor` says; empty if unknown.
    memory: str = ""


@click.group("models", cls=Group, invoke_without_command=True)
@click.option("--json", "is_json", is_flag=True, help="print a JSON array")
@click.pass_context
def command(ctx: click.Context, is_json: bool) -> None:
    """List the models that are on this machine, and say whether they fit its memory."""
    if ctx.invoked_subcommand is not None:
        return
    with busy("Looking for models"):
        found = [*_models()]
    if is_json:
        click.echo(json.dumps([asdict(each) for each in found], indent=1))
        return
    from alignedserve.cli.doctor.finding import in_bytes

    fits = {"ok": "yes", "warn": "just", "fail": "no", "": "?"}
    rows = [("MODEL", "SIZE", "FITS", "WHERE")]
    for each in found:
        rows.append(
            (each.name, in_bytes(each.num_bytes) if each.num_bytes else "-", fits[each.memory], each.place)
        )
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for *cells, place in rows:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        click.echo(f"{'  '.join(padded)}  {place}")


@command.command("pull")
@click.argument("model")
def pull(model: str) -> None:
    """Download MODEL: a name on the Hugging Face hub, or smollm2."""
    from alignedserve.models.locate import locate_model

    located = locate_model(demo.directory_of(model))
    click.echo(f"{located.name} is here: alignedserve run {model}")


@command.command("rm")
@click.argument("model")
def remove(model: str) -> None:
    """Delete MODEL from the hub's cache, or the file of smollm2."""
    from alignedserve.cli.doctor.finding import in_bytes
    from alignedserve.models.packaged import PACKAGED, found, is_packaged, kept_at

    if is_packaged(model):
        if not kept_at(model).is_file():
            package = PACKAGED[model].package
            where = f"in the package {package}: pip uninstall {package}" if found(model) else "not here"
            raise ValueError(f"model={model!r}: is {where}")
        kept_at(model).unlink()
        click.echo(f"{in_bytes(PACKAGED[model].num_bytes)} freed")
        return
    hub = _hub()
    repo = next((each for each in _repositories(hub) if each.repo_id == model), None)
    if hub is None or repo is None:
        whole = f"; with all its files it is {model.partition(':')[0]}" if ":" in model else ""
        raise ValueError(f"model={model!r}: is not in the hub's cache{whole}")
    deletion = hub.delete_revisions(*(each.commit_hash for each in repo.revisions))
    deletion.execute()
    click.echo(f"{deletion.expected_freed_size_str} freed")


def _models() -> Iterator[FoundModel]:
    from alignedserve.models.packaged import PACKAGED, found

    demo_bytes = sum(each.stat().st_size for each in demo.MODEL_DIR.glob("*.safetensors"))
    yield _fitting(FoundModel(demo.NAME, demo_bytes, "here, for tests"))
    for name, model in PACKAGED.items():
        if path := found(name):
            yield _fitting(FoundModel(name, model.num_bytes, str(path)))
        else:
            yield FoundModel(name, 0, f"alignedserve models pull {name}")
    hub = _hub()
    for repo in _repositories(hub):
        sizes = {
            file.blob_path: file.size_on_disk
            for revision in repo.revisions
            for file in revision.files
            if file.file_name.endswith((".safetensors", ".gguf"))
        }
        if sizes:
            yield _fitting(FoundModel(repo.repo_id, sum(sizes.values()), str(repo.repo_path)))


def _fitting(model: FoundModel) -> FoundModel:
    """Adds what `doctor` finds about memory."""
    from dataclasses import replace

    from alignedserve.cli.doctor.case import Case
    from alignedserve.cli.doctor.finding import NotChecked
    from alignedserve.cli.doctor.memory import check_memory
    from alignedserve.launch.settings import settings_of

    options: dict[str, Any] = {}
    try:
        levels = [each.level for each in check_memory(Case(settings_of(model.name, options)))]
    except (ValueError, NotChecked):
        # It is none that can be served: `doctor` says why.
        return model
    worst = max(levels, key=["ok", "note", "warn", "fail"].index)
    return replace(model, memory="ok" if worst == "note" else worst)


def _repositories(hub: HFCacheInfo | None) -> list[CachedRepoInfo]:
    """Returns those of models. A data set may have the same name."""
    found = [each for each in hub.repos if each.repo_type == "model"] if hub else []
    return sorted(found, key=lambda each: each.repo_id)


def _hub() -> HFCacheInfo | None:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return scan_cache_dir()
    except CacheNotFound:
        return None
