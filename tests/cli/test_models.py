"""`alignedserve models`: the hub's cache, and weights that come as a Python package."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from alignedserve import demo
from alignedserve.cli.main import cli
from alignedserve.models import packaged
from alignedserve.models.packaged import PackagedModel

Run = Callable[..., Result]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """With caches of its own, and a package index of its own, in `index`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for tool in ("PIP", "UV"):
        monkeypatch.setenv(f"{tool}_NO_INDEX", "1")
        monkeypatch.setenv(f"{tool}_FIND_LINKS", str(tmp_path / "index"))
    return lambda *words: CliRunner().invoke(cli, ["models", *words])


def in_hub_cache(root: Path, name: str) -> None:
    repo = root / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text(COMMIT)
    for file in demo.MODEL_DIR.iterdir():
        shutil.copy(file, repo / "blobs" / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")


def rows(result: Result) -> dict[str, tuple[int, str]]:
    assert result.exit_code == 0, result.output
    return {each["name"]: (each["num_bytes"], each["memory"]) for each in json.loads(result.output)}


def package(root: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    """Puts a wheel into the index, whose code ends whoever runs it, and which requires what nobody has."""
    name, version = "some_weights", "1.0"
    wheel = root / "index" / f"{name}-{version}-py3-none-any.whl"
    wheel.parent.mkdir()
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(wheel, "w") as into:
        into.writestr(f"{name}/__init__.py", "raise SystemExit('its code was run')")
        into.writestr(f"{name}/x.gguf", content)
        about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: nothing-has-this\n"
        into.writestr(f"{info}/METADATA", about)
        into.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        into.writestr(f"{info}/RECORD", "")
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    model = PackagedModel("some-weights", version, sha256, f"{name}/x.gguf", len(content))
    monkeypatch.setattr(packaged, "PACKAGED", {"some": model})


def test_what_is_here_is_listed_with_its_size_and_whether_it_fits(run: Run, tmp_path: Path) -> None:
    # Just, where other processes have most of the memory.
    assert rows(run("--json"))["demo"][1] in ("ok", "warn")
    assert rows(run("--json"))["smollm2"] == (0, "")
    in_hub_cache(tmp_path, "someone/counts")
    num_bytes = (demo.MODEL_DIR / "model.safetensors").stat().st_size
    found = rows(run("--json"))["someone/counts"]
    assert found[0] == num_bytes and found[1] in ("ok", "warn")
    text = run().output
    assert "someone/counts" in text and "alignedserve models pull smollm2" in text


def test_a_model_of_the_hub_is_deleted_and_then_it_is_not_here(run: Run, tmp_path: Path) -> None:
    in_hub_cache(tmp_path, "someone/counts")
    result = run("rm", "someone/counts")
    assert result.exit_code == 0 and "freed" in result.output
    assert "someone/counts" not in rows(run("--json"))
    result = run("rm", "someone/counts")
    assert result.exit_code and "is not in the hub's cache" in result.output
    assert "with all its files it is someone/counts" in run("rm", "someone/counts:Q4_K_M").output


def test_a_data_set_of_that_name_is_no_model(run: Run, tmp_path: Path) -> None:
    in_hub_cache(tmp_path, "someone/counts")
    (tmp_path / "hub/models--someone--counts").rename(tmp_path / "hub/datasets--someone--counts")
    assert "someone/counts" not in rows(run("--json"))
    assert run("rm", "someone/counts").exit_code
    assert (tmp_path / "hub/datasets--someone--counts").exists()


def test_a_packaged_model_is_fetched_as_data_and_deleted(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path, monkeypatch, b"weights")
    assert packaged.found("some") is None
    path = packaged.fetch("some")
    assert path.read_bytes() == b"weights" and packaged.found("some") == path
    assert [each.name for each in path.parent.iterdir()] == ["x.gguf"]
    # A server may read it: another process that did not find it either leaves it alone.
    before = path.stat()
    assert packaged.fetch("some") == path
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    path.unlink()
    path.symlink_to("nothing")
    assert packaged.fetch("some").read_bytes() == b"weights"
    assert run("rm", "some").exit_code == 0 and packaged.found("some") is None
    result = run("rm", "some")
    assert result.exit_code and "not here" in result.output


def test_what_a_killed_download_left_is_removed_a_day_later(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path, monkeypatch, b"weights")
    directory = packaged.kept_at("some").parent
    old, new = directory / "making-old", directory / "making-new"
    for each in (old, new):
        each.mkdir(parents=True)
        (each / "x").touch()
    os.utime(old, (0, 0))
    (directory / "making-loop").symlink_to("making-loop")
    packaged.fetch("some")
    assert not old.exists() and new.exists()


def test_a_package_with_another_hash_is_not_kept(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path, monkeypatch, b"weights")
    with zipfile.ZipFile(next((tmp_path / "index").iterdir()), "a") as wheel:
        wheel.writestr("some_weights/more", "x")
    with pytest.raises(ValueError, match="some-weights can't be downloaded"):
        packaged.fetch("some")
    assert packaged.found("some") is None and not [*packaged.kept_at("some").parent.iterdir()]
