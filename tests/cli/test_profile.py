"""`alignedserve profile`, of a tiny model for a moment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from alignedserve.instance.profile.saved import decode
from tests.cli.forked import forked

Directory = Callable[[str], Path]
SHORT = (
    *("--seconds", "0.1", "--no-use-tqdm", "--device", "cpu", "--dtype", "float32"),
    *("--max-num-batched-tokens", "64", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(8 << 20)),
)


def test_it_prints_and_saves_what_copies_and_restoring_take(tiny_model: Directory, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    done = forked("profile", str(tiny_model("opt")), "--hidden-cache", "--out", str(path), *SHORT)
    assert done.returncode == 0, done.stderr
    cost = decode(path.read_bytes(), str(path)).cost
    assert not cost.has_free_copies and cost.restored_token_s > 0
    lines = done.stdout.splitlines()
    for name in ("to the pool", "from the pool", "from prefill"):
        assert any(line.startswith(f"| {name} | ") for line in lines), done.stdout
    assert "Restoring KV from kept inputs takes" in done.stdout


def test_a_pool_of_int8_has_a_profile_of_its_own(tiny_model: Directory, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    model = str(tiny_model("llama-gqa-tied"))
    done = forked("profile", model, "--pool-kv-dtype", "int8", "--out", str(path), *SHORT)
    assert done.returncode == 0, done.stderr
    profile = decode(path.read_bytes(), str(path))
    assert profile.facts["pool_kv_dtype"] == "int8" and not profile.cost.restored_token_s
    assert "Restoring" not in done.stdout
    words = ("--pool-kv-dtype", "int8", "--kv-cache-dtype", "int8", "--out", str(path))
    refused = forked("profile", model, *words, *SHORT)
    assert refused.returncode == 2 and "one of them must be auto" in refused.stderr
