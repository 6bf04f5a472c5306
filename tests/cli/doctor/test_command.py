"""`alignedserve doctor` on this machine: that all is well, and each thing that can be made wrong, made wrong."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copytree

import pytest
import torch
from click.testing import CliRunner

from alignedserve import demo
from alignedserve.cli.doctor.command import command
from alignedserve.kernels.cpu.build import cache_dir
from alignedserve.kernels.cpu.library import loaded
from alignedserve.launch.ports import free_port
from tests import quantised_checkpoints
from tests.quantised_checkpoints import FORMATS

AREAS = (
    *("python", "packages", "ray", "gpu", "cores", "model", "weights", "tokenizer", "kernels", "kv", "plan"),
    *("memory", "files", "profile", "store", "redis", "port", "access"),
)
NO_GPU = not torch.cuda.is_available()


@pytest.fixture(scope="module")
def own() -> Iterator[list[str]]:
    """A free port, and a state directory whose name is short."""
    with tempfile.TemporaryDirectory(prefix="state-", dir="/tmp") as state:
        yield ["--port", str(free_port("127.0.0.1")), "--state-dir", state]


Failures = Callable[..., dict[str, str]]


@pytest.fixture
def failures(own: list[str]) -> Failures:
    """Of `doctor` with these words and `own`: what has failed, by area."""

    def run(*words: str) -> dict[str, str]:
        done = CliRunner().invoke(command, [*own, *words, "--json"])
        found = json.loads(done.stdout)
        failed = {each["area"]: each for each in found["findings"] if each["level"] == "fail"}
        assert done.exit_code == int(bool(failed)) == int(not found["ok"])
        assert all(each["remedy"] for each in failed.values())
        return {area: str(each["text"]) for area, each in failed.items()}

    return run


def doctor(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    process = [sys.executable, "-m", "alignedserve", "doctor", *words]
    return subprocess.run(process, capture_output=True, text=True, timeout=120, env=os.environ | environment)


@pytest.mark.slow
def test_all_is_well_with_the_demo_model(own: list[str]) -> None:
    done = doctor(*own)
    *lines, summary = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and done.stderr == "", done.stdout + done.stderr
    assert list(dict.fromkeys(area for _, area, _ in lines)) == list(AREAS)
    found = {area: text for _, area, text in lines}
    # 2 bytes of 64 values of 2 heads, k and v, in 4 layers
    assert found["kv"].startswith("2.0 KiB a token; each instance: ")
    assert found["weights"].startswith("complete, 5.4 MiB in bfloat16")
    assert found["redis"].endswith("-server starts")
    assert "0 failures" in " ".join(summary)


@pytest.mark.slow
def test_without_a_compiler_plain_torch_computes(own: list[str]) -> None:
    found = {each["area"]: each for each in json.loads(doctor(*own, "--json", PATH="").stdout)["findings"]}
    assert (found["kernels"]["level"], "need a C++20 compiler" in found["kernels"]["text"]) == ("warn", True)


@pytest.mark.slow
def test_kernels_that_were_asked_for_need_a_compiler(
    failures: Failures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    # Another test of this process may have loaded them.
    loaded.cache_clear()
    assert set(failures("--attention-backend", "cpu")) == {"kernels"}
    assert set(failures("--attention-backend", "torch")) == set()


def test_a_model_that_is_not_there(failures: Failures, tmp_path: Path) -> None:
    assert "must be an existing directory" in failures("no-such-model")["model"]
    assert set(failures(str(tmp_path))) == {"model"}


def test_a_model_that_may_be_on_the_hub_is_not_asked_for(
    failures: Failures, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hub:
        hub.setblocking(False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")
        assert failures("someone/no-such-model") == {}
        with pytest.raises(BlockingIOError):
            hub.accept()


def test_a_model_in_the_hubs_cache(
    failures: Failures, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--someone--demo"
    snapshot = copytree(demo.MODEL_DIR, folder / "snapshots" / ("0" * 40))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    with socket.create_server(("127.0.0.1", 0)) as hub:
        hub.setblocking(False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")
        assert failures("someone/demo") == {}
        # `serve` downloads what is missing, and this command does not.
        (snapshot / "model.safetensors").unlink()
        assert failures("someone/demo") == {}
        (snapshot / "config.json").write_text("{}")
        assert set(failures("someone/demo")) == {"model"}
        with pytest.raises(BlockingIOError):
            hub.accept()


@pytest.mark.slow
def test_a_model_of_another_family(failures: Failures, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    failed = failures(str(tmp_path))
    assert set(failed) == {"model"} and "MambaForCausalLM" in failed["model"]


@pytest.mark.slow
def test_weights_that_are_not_whole(failures: Failures, tmp_path: Path) -> None:
    model = copytree(demo.MODEL_DIR, tmp_path / "model")
    path = model / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    failed = failures(str(model))
    assert set(failed) == {"weights"} and "is truncated" in failed["weights"]
    path.unlink()
    assert "holds no weights" in failures(str(model))["weights"]


@pytest.mark.slow
def test_a_checkpoint_that_is_quantised(failures: Failures, own: list[str], tmp_path: Path) -> None:
    model, _ = quantised_checkpoints.build("llama", FORMATS["gptq-4-128"], tmp_path)
    words = [str(model), "--skip-tokenizer-init"]
    assert "linear layers in int4 (gptq)" in CliRunner().invoke(command, [*own, *words]).stdout
    assert failures(*words) == {}
    quantised_checkpoints.change_config(model, group_size=64)
    assert "qzeros has shape (1, 16); must be (2, 16)" in failures(*words)["weights"]
    quantised_checkpoints.change_config(model, bits=3)
    assert "bits is 3; must be 4 or 8" in failures(*words)["model"]


@pytest.mark.slow
def test_a_mixture_of_which_the_experts_alone_are_quantised(own: list[str], tmp_path: Path) -> None:
    model, _ = quantised_checkpoints.build_mxfp4(tmp_path)
    words = [*own, str(model), "--skip-tokenizer-init", "--device", "cpu", "--json"]
    found = {each["area"]: each for each in json.loads(CliRunner().invoke(command, words).stdout)["findings"]}
    assert found["weights"]["level"] == "ok" and "linear" not in found["weights"]["text"]
    assert " in float32, experts in mxfp4" in found["weights"]["text"]


@pytest.mark.slow
def test_weights_of_another_model(failures: Failures, tmp_path: Path) -> None:
    model = copytree(demo.MODEL_DIR, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    for change, said in (
        ({"num_hidden_layers": 3}, "does not have"),
        ({"num_hidden_layers": 5}, "is missing"),
    ):
        (model / "config.json").write_text(json.dumps(config | change))
        failed = failures(str(model))
        assert set(failed) == {"weights"} and said in failed["weights"]


@pytest.mark.slow
def test_a_tokenizer_that_is_not_there(failures: Failures, tmp_path: Path) -> None:
    model = copytree(demo.MODEL_DIR, tmp_path / "model")
    (model / "tokenizer.json").unlink()
    failed = failures(str(model))
    assert set(failed) == {"tokenizer"} and "holds no tokenizer" in failed["tokenizer"]
    assert failures(str(model), "--skip-tokenizer-init") == {}


@pytest.mark.slow
def test_memory_that_is_not_there(failures: Failures) -> None:
    failed = failures("--pool-memory-bytes", str(1 << 50))
    assert set(failed) == {"plan"} and "bytes of shared memory are free" in failed["plan"]
    failed = failures("--kv-cache-memory-bytes", "40000")
    assert set(failed) == {"kv"} and "one request of --max-model-len 2048 tokens needs" in failed["kv"]
    many = ["opt-30b", "--load-format", "dummy", "--decode-instances", "1000", "--device", "cpu"]
    assert " available: weights " in failures(*many)["memory"]


@pytest.mark.slow
def test_options_that_are_none(failures: Failures) -> None:
    everywhere = ["--host", "0.0.0.0"]  # noqa: S104
    assert "reachable from other machines" in failures(*everywhere)["options"]
    assert failures(*everywhere, "--allow-no-auth") == {}
    assert "--max-model-len 4096" in failures("--max-model-len", "4096")["model"]
    assert "policy" in failures("--policy", "none:None")["plan"]
    assert "can't be read" in failures("--api-key-file", "/no/such/file")["access"]


@pytest.mark.skipif(not NO_GPU, reason="there is one")
def test_a_gpu_that_is_not_there(failures: Failures) -> None:
    assert failures("--device", "cuda") == {"gpu": "--device cuda: this machine has no GPU"}


def test_a_port_that_is_taken_and_an_address_that_is_none(failures: Failures) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert failures("--port", port) == {
            "port": f"--port {port}: another program listens on it at 127.0.0.1"
        }
    address = ["--host", "192.0.2.1", "--allow-no-auth"]
    assert set(failures(*address)) == {"port"}


def test_a_state_directory_that_can_not_be(failures: Failures, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    failed = failures("--state-dir", str(tmp_path / "file" / "state"))
    assert set(failed) == {"store"} and "Not a directory" in failed["store"]


@pytest.mark.slow
def test_a_place_of_files_that_can_not_be_written(
    failures: Failures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert "file" in failures("--files-at", str(file))["files-at"]
    # nobody listens there
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert "can't be written" in failures("--files-at", "s3://bucket/files")["files-at"]
    assert not failures("--files-at", str(tmp_path / "files"))
    assert not list((tmp_path / "files").iterdir())


def test_a_redis_that_is_not_there(failures: Failures) -> None:
    failed = failures("--redis-url", f"redis://127.0.0.1:{free_port('127.0.0.1')}")
    assert set(failed) == {"store"} and "does not answer" in failed["store"]
    assert "--redis-url" in failures("--redis-url", "nonsense")["store"]


# It runs `doctor` where no distribution has a name like that.
WITHOUT = """
import sys
from importlib import metadata
hidden = sys.argv.pop(1)
find = metadata.Distribution.from_name.__func__
def from_name(cls, name):
    if name.startswith(hidden):
        raise metadata.PackageNotFoundError(name)
    return find(cls, name)
metadata.Distribution.from_name = classmethod(from_name)
from alignedserve.cli import main
main()
"""


@pytest.mark.parametrize("is_wanted", [False, True], ids=["no traces", "traces"])
def test_traces_without_what_sends_them(own: list[str], is_wanted: bool) -> None:
    words = ["doctor", *own, *(["--otlp-endpoint", "http://127.0.0.1:4318"] if is_wanted else [])]
    command = [sys.executable, "-c", WITHOUT, "opentelemetry", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    failed = [each for each in json.loads(done.stdout)["findings"] if each["level"] == "fail"]
    assert done.returncode == len(failed) == int(is_wanted)
    for each in failed:
        assert each["area"] == "extras" and each["remedy"] == "pip install 'alignedserve[otel]'"
        assert (
            each["text"].startswith("--otlp-endpoint: opentelemetry-") and "is not installed" in each["text"]
        )


def test_a_server_that_is_not_there(failures: Failures) -> None:
    url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    failed = failures("--url", url)
    assert set(failed) == {"health"} and "no server answers there" in failed["health"]
    # Without an answer nothing else is checked.
    done = CliRunner().invoke(command, ["--url", f"{url}/v1"])
    assert len(done.stdout.splitlines()) == 2
    assert done.stdout.endswith(f"0 ok, 0 warnings, 1 failure: the server at {url} does not answer\n")


def test_it_reads_the_environment_that_serve_reads(own: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGNEDSERVE_SERVE_MAX_MODEL_LEN", "100")
    assert "256 requests of 100" in CliRunner().invoke(command, own).stdout


@pytest.mark.slow
def test_it_counts_requests_of_a_model_with_a_window_by_what_they_hold(
    own: list[str], tiny_model: Callable[[str], Path]
) -> None:
    words = [*own, str(tiny_model("mistral-window")), "--skip-tokenizer-init"]
    words += ["--kv-cache-memory-bytes", str(100 * 12_288), "--max-num-batched-tokens", "32"]
    said = " ".join(CliRunner().invoke(command, words).stdout.split())
    # Nine blocks each, not 32.
    assert "11 requests of 512; they hold only the last 24 tokens while decoding" in said


@pytest.mark.slow
def test_it_counts_requests_of_a_model_of_which_some_layers_slide_by_what_they_hold(
    own: list[str], tiny_model: Callable[[str], Path]
) -> None:
    words = [*own, str(tiny_model("gemma3")), "--skip-tokenizer-init"]
    words += ["--kv-cache-memory-bytes", str(300 * 8192), "--max-num-batched-tokens", "32"]
    said = " ".join(CliRunner().invoke(command, words).stdout.split())
    # Of its three layers, in groups of one, two slide: 32 + 2 * 9 blocks of 8 KiB each, not 3 * 32.
    text = "6 requests of 512; sliding-window layers hold only the last 24 tokens while decoding"
    assert text in said
    assert "1.5 KiB a token; each instance: 1600 tokens or more (2.3 MiB)" in said


@pytest.mark.slow
def test_it_knows_what_layers_with_a_state_need(own: list[str], tiny_model: Callable[[str], Path]) -> None:
    words = [*own, str(tiny_model("fading-sum")), "--skip-tokenizer-init", "--max-num-batched-tokens", "32"]
    said = " ".join(CliRunner().invoke(command, words).stdout.split())
    assert "; layers with a state hold only the last one while decoding" in said and "backend torch" in said
    said = " ".join(CliRunner().invoke(command, [*words, "--attention-backend", "cpu"]).stdout.split())
    assert "--attention-backend cpu: must be torch for a model that has layers with a state" in said


@pytest.mark.slow
def test_it_leaves_the_hub_the_kernels_and_the_state_as_they_are(own: list[str]) -> None:
    before = sorted(cache_dir().glob("*.so"))
    CliRunner().invoke(command, own)
    assert sorted(cache_dir().glob("*.so")) == before
    # Its own: other processes run it too.
    assert not list(Path("/tmp").glob(f"doctor-{os.getpid()}-*"))
    assert not list(Path("/dev/shm").glob(f"alignedserve-doctor-{os.getpid()}*"))
