"""What is packed for a bare machine, and the words that a random model outputs there."""

from __future__ import annotations

from pathlib import Path

import pytest

from alignedserve.text.tokenizer import Tokenizer
from benchmarks.gpu.prepare import missing, named, needed
from benchmarks.gpu.words import word, write_tokenizer


@pytest.mark.parametrize(
    ("requirement", "name"),
    [
        ("ray==2.50.0", "ray"),
        ("Typing_Extensions >=4", "typing-extensions"),
        ("uvicorn[standard]>=0.30; python_version < '3.13'", "uvicorn"),
        (" msgspec~=0.19 ", "msgspec"),
        ("six!=1.0", "six"),
        ("httpx<1", "httpx"),
        ("rich", "rich"),
        ("tzdata;sys_platform=='win32'", "tzdata"),
    ],
)
def test_a_requirement_is_named_without_its_versions(requirement: str, name: str) -> None:
    assert named(requirement) == name


def test_what_is_missing_is_brought_unless_it_is_heavy() -> None:
    pinned = ["pydantic==2.12.0", "typing-inspection==0.4.2", "torch==2.11.0", "nvidia-nccl-cu13==2.28.0"]
    assert missing(pinned, []) == ["pydantic==2.12.0", "typing-inspection==0.4.2"]
    assert missing(pinned, ["Pydantic==1.0", "numpy==2.0"]) == ["typing-inspection==0.4.2"]
    assert missing(pinned, ["pydantic", "typing_inspection"]) == []


def test_what_is_needed_has_the_servers_packages_and_none_that_is_heavy() -> None:
    names = set(map(named, needed()))
    assert {"ray", "msgspec", "pytest", "trustme"} <= names
    assert not [name for name in names if name.startswith(("torch", "triton", "nvidia"))]


def test_every_token_is_a_word(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(write_tokenizer(tmp_path / "words", vocab_size=300))
    tokens = [7, 0, 299, 7, 128]
    text = " ".join(map(word, tokens))
    assert tokenizer.encode(text) == tokens
    assert tokenizer.decode(tokens) == text == "t7 t0 t299 t7 t128"
    assert tokenizer.chat_ids([{"role": "user", "content": text}]) == tokens
