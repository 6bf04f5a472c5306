"""Adapters are loaded and unloaded while a whole system runs and its processes are killed: each answer is the one of an
engine that was started with the adapter."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from alignedserve import demo
from tests.launch import streams
from tests.launch.server import EXACT, NO_TLS, POOL, Server, serving, until
from tests.launch.streams import engine_alone
from tests.tiny_adapters import write_adapter

pytestmark = [pytest.mark.slow, pytest.mark.drawn(one_in=4, turn=2, alone=True)]

NAMES = ("one", "two", "three")
MODELS = ("demo", "one", "two")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    to = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(to / name, demo.MODEL_DIR, seed) for seed, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def server(paths: dict[str, Path]) -> Iterator[Server]:
    options = ("--max-loras", "2", "--lora-modules-from", str(paths["one"].parent), "--gateways", "2")
    with serving(*EXACT, *POOL, *options) as found:
        yield found


def call(server: Server, path: str, **body: Any) -> httpx2.Response:
    return httpx2.post(f"{server.url}/{path}", json=body, timeout=150, verify=NO_TLS)


def load(server: Server, name: str, path: Path, **more: Any) -> httpx2.Response:
    return call(server, "v1/load_lora_adapter", lora_name=name, lora_path=str(path), **more)


def unload(server: Server, name: str) -> httpx2.Response:
    return call(server, "v1/unload_lora_adapter", lora_name=name)


def listed(server: Server) -> list[str]:
    return [each["id"] for each in server.get("/v1/models").json()["data"]]


def ask(server: Server, model: str) -> httpx2.Response:
    return call(server, "v1/completions", model=model, prompt="Count.", max_tokens=3)


@contextmanager
def with_files(paths: dict[str, Path], name: str, of: str) -> Iterator[Path]:
    """A directory called `name` with another adapter's files, which is gone afterwards."""
    path = paths["one"].parent / name
    shutil.copytree(paths[of], path)
    try:
        yield path
    finally:
        shutil.rmtree(path)


def test_an_adapter_serves_at_once_whatever_dies(server: Server, paths: dict[str, Path]) -> None:
    modules = tuple(f"{name}={paths[name]}" for name in MODELS[1:])
    expected = engine_alone(lora_modules=modules, models=MODELS)
    assert ask(server, "one").status_code == 404
    with with_files(paths, "soon-gone", of="one") as path:
        answer = load(server, "one", path)
        assert (answer.status_code, answer.text) == (
            200,
            "Success: LoRA adapter 'one' added successfully.",
        )
    server.kill(["decode-0"])
    # Every connection may reach another gateway.
    assert [listed(server) for _ in range(8)] == [["demo", "one"]] * 8
    again = load(server, "one", paths["one"])
    assert again.status_code == 400 and "has already been loaded" in again.json()["error"]["message"]
    assert load(server, "two", paths["two"]).status_code == 200
    texts, _ = streams.ask_all(server.url, lambda: server.kill(["prefill-0", "decode-0"]), models=MODELS)
    assert texts == expected
    server.until_whole()
    texts, _ = streams.ask_all(server.url, lambda: server.kill(["router"]), models=MODELS)
    assert texts == expected
    server.until_whole()
    server.kill(["gateway-0", "gateway-1"])
    server.until_whole()
    until(lambda: listed(server) == ["demo", "one", "two"])
    assert streams.ask_all(server.url, models=MODELS)[0] == expected


def test_a_refused_adapter_changes_nothing(server: Server, paths: dict[str, Path], tmp_path: Path) -> None:
    before = listed(server)
    high = write_adapter(paths["one"].parent / "high", demo.MODEL_DIR, seed=1, r=17)
    full = load(server, "three", paths["three"])
    assert full.status_code == 400 and "max_loras=2" in full.json()["error"]["message"]
    assert unload(server, "two").text == "Success: LoRA adapter 'two' removed successfully."
    refused = load(server, "three", high)
    assert refused.status_code == 400
    assert "its rank r is 17; must be at most max_lora_rank=16" in refused.json()["error"]["message"]
    elsewhere = load(server, "three", write_adapter(tmp_path / "elsewhere", demo.MODEL_DIR, seed=1))
    assert elsewhere.status_code == 400 and "only from below" in elsewhere.json()["error"]["message"]
    assert load(server, "three", paths["one"].parent / "none").status_code == 404
    assert unload(server, "three").status_code == 404
    assert load(server, "two", paths["two"]).status_code == 200
    assert listed(server) == before


def test_an_unloaded_adapter_finishes_what_runs_and_its_name_may_mean_another(
    server: Server, paths: dict[str, Path]
) -> None:
    modules = tuple(f"{name}={paths[name]}" for name in MODELS[1:])
    expected = engine_alone(lora_modules=modules, models=MODELS)

    def unload_two() -> None:
        assert unload(server, "two").status_code == 200
        assert ask(server, "two").status_code == 404
        server.kill(["decode-0"])

    texts, _ = streams.ask_all(server.url, unload_two, models=MODELS)
    assert texts == expected
    server.until_whole()
    # Nothing that is kept of the first one is found by the second.
    assert load(server, "two", paths["three"]).status_code == 200
    other = (modules[0], f"two={paths['three']}")
    assert (
        streams.ask_all(server.url, models=MODELS)[0]
        == engine_alone(lora_modules=other, models=MODELS)
        != expected
    )
    assert load(server, "two", paths["two"], load_inplace=True).status_code == 200
    assert streams.ask_all(server.url, models=MODELS)[0] == expected


def test_the_prefix_cache_is_reset_under_load(server: Server) -> None:
    def reset() -> None:
        for path in ("reset_prefix_cache", "flush_cache"):
            assert call(server, path).status_code == 200

    assert streams.ask_all(server.url, reset)[0] == engine_alone()
    assert 'alignedserve:prefix_cache_resets_total{island="0"} 2.0' in server.get("/metrics").text
