"""A file's directory in the cache is made once, by whoever is first, and is that file's own."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from alignedserve.launch.settings import settings_of
from alignedserve.models.gguf.file_names import model_name
from alignedserve.models.source import resolve_model
from tests.models.gguf.files import write_gguf

Directory = Callable[[str], Path]


@pytest.fixture
def path(tiny_model: Directory, tmp_path: Path) -> Path:
    return write_gguf(tiny_model("llama-mha"), tmp_path / "model.gguf")


def directory_of(path: Path) -> Path:
    directory = resolve_model(path).directory
    assert directory is not None
    return directory


def test_it_is_made_once(path: Path, own_cache: Path) -> None:
    directory = directory_of(path)
    made = (directory / "config.json").stat().st_mtime_ns
    assert directory_of(path) == directory
    assert (directory / "config.json").stat().st_mtime_ns == made
    assert [*own_cache.iterdir()] == [directory]
    assert {each.name for each in directory.iterdir()} == {
        "config.json",
        "generation_config.json",
        "from-00000.gguf",
    }


def test_another_version_of_a_file_has_another(path: Path, tiny_model: Directory) -> None:
    first = directory_of(path)
    write_gguf(tiny_model("qwen2"), path)
    assert directory_of(path) != first
    assert resolve_model(path).config.architecture == "qwen2"


def test_a_file_that_was_replaced_is_not_opened_with_the_old_configuration(path: Path) -> None:
    model = resolve_model(path)
    model.open_weights(torch.float32, "cpu")
    newer = path.with_name("newer.gguf")
    shutil.copyfile(path, newer)
    os.utime(newer, ns=(0, 0))
    newer.rename(path)
    with pytest.raises(ValueError, match=r"model\.gguf: was replaced since .*; start the whole server again"):
        model.open_weights(torch.float32, "cpu")


def test_other_users_may_read_it(path: Path) -> None:
    assert directory_of(path).stat().st_mode & 0o777 == 0o755


def test_without_a_home_the_setting_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    # It has no home of its own name either.
    monkeypatch.setenv("HOME", "~")
    with pytest.raises(ValueError, match="no home directory for the cache; XDG_CACHE_HOME names another"):
        resolve_model(path)


def test_a_copy_outlives_its_original(path: Path) -> None:
    directory_of(path)
    copy = path.with_name("copy.gguf")
    shutil.copy2(path, copy)
    path.unlink()
    assert (directory_of(copy) / "from-00000.gguf").resolve() == copy


def test_a_relative_path_may_be_read_from_elsewhere(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    directory = directory_of(Path(path.name))
    monkeypatch.chdir("/")
    assert (directory / "from-00000.gguf").read_bytes()[:4] == b"GGUF"


def test_several_may_make_it_at_once(path: Path, own_cache: Path) -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        found = pool.map(directory_of, [path] * 16)
    assert {*found} == {*own_cache.iterdir()} == {found[0]}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_that_can_not_be_written_is_named(path: Path, own_cache: Path) -> None:
    own_cache.parent.mkdir()
    own_cache.parent.chmod(0o500)
    with pytest.raises(ValueError, match="can't be written there: Permission denied; XDG_CACHE_HOME"):
        resolve_model(path)


def test_a_file_in_the_place_of_the_cache_is_named(path: Path, own_cache: Path) -> None:
    own_cache.parent.mkdir()
    own_cache.touch()
    with pytest.raises(ValueError, match="can't be written there: File exists; XDG_CACHE_HOME"):
        resolve_model(path)


def test_a_model_that_is_not_supported_leaves_nothing(path: Path, own_cache: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"llama", b"lamma"))
    message = (
        "general.architecture is 'lamma'; must be one of llama, qwen2, qwen3, qwen3moe, gemma3, phi3, gpt-oss"
    )
    with pytest.raises(ValueError, match=message):
        resolve_model(path)
    assert not own_cache.exists()


def test_an_impossible_size_is_named_with_the_file(path: Path) -> None:
    old, new = (b"llama.attention.head_count" + bytes([4, 0, 0, 0, number]) for number in (4, 3))
    assert old in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(old, new))
    with pytest.raises(ValueError, match=rf"{path}: num_key_value_heads is 4; must divide"):
        resolve_model(path)


def split(tiny_model: Directory, tmp_path: Path) -> list[Path]:
    write_gguf(tiny_model("llama-mha"), tmp_path / "model.gguf", num_files=2)
    return sorted(tmp_path.iterdir())


def test_a_missing_part_is_named(tiny_model: Directory, tmp_path: Path) -> None:
    first, second = split(tiny_model, tmp_path)
    second.unlink()
    with pytest.raises(ValueError, match=r"of its 2 files model-00002-of-00002\.gguf is missing"):
        resolve_model(first)


def test_a_later_part_is_refused(tiny_model: Directory, tmp_path: Path) -> None:
    _, second = split(tiny_model, tmp_path)
    with pytest.raises(ValueError, match=r"must be the first of the 2 files, -00001-of-00002"):
        resolve_model(second)


def test_parts_must_be_in_order(tiny_model: Directory, tmp_path: Path) -> None:
    first, second = split(tiny_model, tmp_path)
    second.write_bytes(first.read_bytes())
    with pytest.raises(ValueError, match=r"00002-of-00002\.gguf: split\.no is 0; must be 1, as in its name"):
        resolve_model(first)


def test_a_part_alone_is_refused(tiny_model: Directory, tmp_path: Path) -> None:
    first, _ = split(tiny_model, tmp_path)
    alone = first.rename(tmp_path / "alone.gguf")
    with pytest.raises(ValueError, match=r"alone\.gguf: split\.count is 2; must be 1, as in its name"):
        resolve_model(alone)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("/models/SmolLM2-135M.Q4_1.gguf", "SmolLM2-135M.Q4_1"),
        ("Qwen3-30B-Q4_K_M-00001-of-00003.gguf", "Qwen3-30B-Q4_K_M"),
    ],
)
def test_a_file_is_served_by_its_name(given: str, name: str) -> None:
    assert model_name(given) == name
    assert settings_of(given, {}).served_name == name
    assert settings_of(given, {"served_model_name": "other"}).served_name == "other"


def test_a_config_of_someone_else_opens_no_file(path: Path, tmp_path: Path) -> None:
    """A directory from the hub has no links of ours, whatever its config.json says."""
    directory = tmp_path / "directory"
    directory.mkdir()
    config = json.loads((directory_of(path) / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gguf", "types": ["Q8_0"]}
    (directory / "config.json").write_text(json.dumps(config))
    model = resolve_model(directory)
    with pytest.raises(ValueError, match=re.escape(f"{directory} holds no weights")):
        model.open_weights(torch.float32, "cpu")
