from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from alignedserve.models.dummy_weights import DummySource
from alignedserve.models.safetensors_source import SafetensorsSource
from alignedserve.models.source import resolve_model
from tests.models.gguf.files import write_gguf

ROOT = Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 10,
    "hidden_size": 4,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def write_model(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    save_file({"x": torch.ones(3)}, directory / "model.safetensors")
    return directory


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    source = resolve_model(write_model(tmp_path / "model"))
    assert (source.directory, source.is_dummy) == (tmp_path / "model", False)
    assert source.config.hidden_size == 4
    weights = source.open_weights(torch.float32, "cpu", progress=False)
    assert isinstance(weights, SafetensorsSource)
    assert weights.take("x", (3,)).tolist() == [1, 1, 1]


def test_a_directory_may_have_dummy_weights(tmp_path: Path) -> None:
    source = resolve_model(write_model(tmp_path), load_format="dummy")
    assert source.directory == tmp_path
    assert isinstance(source.open_weights(torch.float32, "cpu"), DummySource)


def test_a_preset_needs_dummy_weights() -> None:
    source = resolve_model("opt-125m", load_format="dummy")
    assert (source.directory, source.config.hidden_size) == (None, 768)
    assert isinstance(source.open_weights(torch.float32, "cpu"), DummySource)
    with pytest.raises(
        ValueError, match=r"load_format is 'auto' for the preset opt-125m, .* must be \"dummy\""
    ):
        resolve_model("opt-125m")


def test_a_directory_goes_before_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "opt-125m")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("opt-125m").config.hidden_size == 4


@pytest.mark.parametrize(
    "name", ["opt-125", "./nothing", "/nothing", "~/nothing", "~no-such-user/x", "a/b/c", "nothing/"]
)
def test_a_name_that_can_be_nothing_is_reported_with_what_is_allowed(name: str) -> None:
    with pytest.raises(ValueError, match=r"must be an existing directory, .* preset: opt-125m, ") as error:
        resolve_model(name)
    assert repr(name) in str(error.value)


def test_a_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "m.bin").touch()
    with pytest.raises(ValueError, match=r"m\.bin', which is a file; must be a directory, or a \.gguf file"):
        resolve_model(tmp_path / "m.bin")


def test_an_unknown_load_format_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="load_format is 'gguf'; must be one of auto, safetensors, dummy"):
        resolve_model(tmp_path, load_format="gguf")


def resolve_elsewhere(environment: dict[str, str], *models: tuple[str, str]) -> list[tuple[str, set[str]]]:
    """Each one's directory and the names of its files then, or the error and none. In a process of its own: the hub's
    client reads its environment when it is imported."""
    result = subprocess.run(
        [sys.executable, "-c", RESOLVE, json.dumps(models)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_PROGRESS_BARS": "1", **environment},
    )
    return [(text, set(names)) for text, names in json.loads(result.stdout)]


RESOLVE = """
import json, sys
from alignedserve.models.source import resolve_model

def resolve(model, load_format):
    try:
        directory = resolve_model(model, load_format).directory
    except ValueError as error:
        return str(error), []
    return str(directory), [path.name for path in directory.iterdir()]

print(json.dumps([resolve(*arguments) for arguments in json.loads(sys.argv[1])]))
"""


@pytest.mark.slow
def test_offline_the_cache_is_used_and_nothing_else(tmp_path: Path) -> None:
    repository = tmp_path / "models--some--model"
    snapshot = write_model(repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    offline = {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    (found, _), (message, _) = resolve_elsewhere(offline, ("some/model", "auto"), ("other/model", "auto"))
    assert found == str(snapshot)
    assert (
        "model is 'other/model', which is not a directory here and cannot be fetched from the hub" in message
    )


FILES = {
    "config.json": json.dumps(CONFIG).encode(),
    "model.safetensors": b"weights",
    "chat_template.jinja": b"template",
    "merges.txt": b"merges",
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"again",
    "original/params.json": b"{}",
    "README.md": b"words",
}
REPOSITORIES = {"some/model": FILES}


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as one download asks for."""

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        name = next((name for name in REPOSITORIES if f"/{name}" in path), "")
        files = REPOSITORIES.get(name, {})
        if name and path.startswith(f"/api/models/{name}/tree"):
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": "0"}
                for name, content in files.items()
            ]
            self.answer(200, json.dumps(entries).encode())
        elif name and path.startswith(f"/api/models/{name}"):
            siblings = [{"rfilename": each} for each in files]
            self.answer(200, json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode())
        elif name and path.startswith(f"/{name}/resolve/{COMMIT}/"):
            content = files[path.split(COMMIT + "/")[1]]
            self.answer(200, content, {"ETag": f'"{hash(content)}"', "X-Repo-Commit": COMMIT})
        else:
            self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        """Quiet."""


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_only_what_is_needed_is_downloaded_and_never_a_pickle(hub: str, tmp_path: Path) -> None:
    environment = {"HF_ENDPOINT": hub, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    small = {"config.json", "chat_template.jinja", "merges.txt"}
    (_, first), (_, then), (message, _) = resolve_elsewhere(
        environment, ("some/model", "dummy"), ("some/model", "auto"), ("other/model", "auto")
    )
    assert first == small and then == small | {"model.safetensors"}
    assert message == "model is 'other/model', which is neither a directory here nor a repository on the hub"


@pytest.mark.slow
def test_of_a_repository_of_gguf_files_one_quantisation_is_downloaded(
    hub: str, tmp_path: Path, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tiny_model("qwen2"), tmp_path / "m-Q8_0.gguf", quantise="Q8_0", num_files=2)
    parts = {path.name: path.read_bytes() for path in tmp_path.glob("*.gguf")}
    others = dict.fromkeys(
        ("out-of-m-Q4_K_M.gguf", "m-UD-Q8_0.gguf", "mmproj-m-Q8_0.gguf", "m.F16.gguf"), b"other"
    )
    monkeypatch.setitem(REPOSITORIES, "some/gguf", {**parts, **others, "README.md": b"words"})
    cache = tmp_path / "hub"
    environment = {"HF_HUB_CACHE": str(cache), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    online = environment | {"HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0"}
    (message, _), (unnamed, _), (_, names) = resolve_elsewhere(
        online, ("some/gguf:Q5_0", "auto"), ("some/gguf", "auto"), ("some/gguf:q8_0", "auto")
    )
    (unlike, _), (unreachable, _) = resolve_elsewhere(
        online, ("some/gguf:Q4_K_M", "auto"), ("other/gguf:Q4_K_M", "auto")
    )
    assert unlike.endswith(" is truncated: 5 bytes; must have at least 24")
    assert (
        unreachable == "model is 'other/gguf', which is neither a directory here nor a repository on the hub"
    )
    assert message == (
        "model is 'some/gguf:Q5_0'; must name one quantization of those that are there: "
        "Q8_0, UD-Q8_0, F16, Q4_K_M"
    )
    assert "if it holds GGUF files, name one, as in some/gguf:Q4_K_M" in unnamed
    assert {"config.json", "from-00000.gguf", "from-00001.gguf"} <= names
    assert {path.name for path in cache.rglob("*.gguf")} == {*parts, "out-of-m-Q4_K_M.gguf"}
    (found, _), (missing, _) = resolve_elsewhere(
        environment | {"HF_HUB_OFFLINE": "1"}, ("some/gguf:Q8_0", "auto"), ("some/gguf:F16", "auto")
    )
    assert Path(found).is_relative_to(tmp_path / "cache")
    assert missing.endswith("must name one quantization of those that are there: Q8_0, Q4_K_M")
