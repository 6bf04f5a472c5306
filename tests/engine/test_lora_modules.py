from __future__ import annotations

from pathlib import Path

import pytest

from alignedserve.engine.config import EngineConfig
from alignedserve.engine.lora_modules import parse_lora_modules, with_absolute_paths


def test_both_forms_of_vllm() -> None:
    texts = ("a=/x/y", "b=with=more", '{"name": "c", "path": "z", "base_model_name": "org/base"}')
    assert parse_lora_modules(texts) == (("a", "/x/y"), ("b", "with=more"), ("c", "z"))


def test_paths_are_absolute_for_other_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    found = parse_lora_modules(with_absolute_paths(("a=/x", 'b=y "z"', "c=~/v")))
    assert found == (("a", "/x"), ("b", str(tmp_path / 'y "z"')), ("c", "/home/me/v"))


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("a\nb=/c",), r"'a\\nb': a name must be of printable characters"),
        (('{"name": "\\ud800", "path": "/c"}',), "a name must be of printable characters"),
        (('{"a":' * 20_000,), "is not valid JSON"),
        (("a",), "lora_modules: 'a' must be name=path, or a JSON object with name and path"),
        (("=b",), "lora_modules: '=b' must be name=path"),
        (("a=",), "lora_modules: 'a=' must be name=path"),
        (('{"name": "a"}',), "must have name and path, both strings"),
        (('{"name": "a", "path": 3}',), "must have name and path, both strings"),
        (('{"name": "a", "pth": "b"}',), r"has \['pth'\]; known are base_model_name, name, path"),
        (("{",), "is not valid JSON"),
        (("a=b", "a=c"), "lora_modules: 'a' is the name of 2 adapters; names must be unique"),
    ],
)
def test_what_is_malformed_is_named(texts: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig("x", lora_modules=texts)


def test_a_rank_is_at_least_one() -> None:
    with pytest.raises(ValueError, match="max_lora_rank=0: must be an integer, at least 1"):
        EngineConfig("x", max_lora_rank=0)
