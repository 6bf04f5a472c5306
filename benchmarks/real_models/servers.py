"""The servers: how each is started, and the memory of its processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import torch

from alignedserve.launch.leftovers import descendants
from alignedserve.launch.ports import free_port
from alignedserve.models.listed_weights import num_weight_bytes
from alignedserve.models.locate import Location
from alignedserve.models.source import open_checkpoint
from benchmarks.rt_with_be.served import HOST, running

PARTS = ("load", "prompts", "streams", "chats")
# Clients' name of the model, on each server.
NAME = "real"
START_S, LOOK_S = 900.0, 0.02
PEER_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
OURS, COLOCATED, LLAMA, VLLM = "serve", "serve, colocated", "llama-server", "vLLM, bfloat16"
# 32 slots, each with room for any request of these parts.
SLOTS = ("--parallel", "32", "--ctx-size", str(32 * 512), "--no-kv-unified")


@dataclass(frozen=True)
class Server:
    name: str
    # Without the port.
    command: Sequence[str]
    # What is measured with this command.
    parts: tuple[str, ...] = PARTS
    environment: Mapping[str, str] = field(default_factory=dict)
    # The bytes of the weights of all instances, if that is ours.
    weight_bytes: int | None = None

    @property
    def is_ours(self) -> bool:
        return self.weight_bytes is not None


@dataclass(frozen=True)
class Started:
    url: str
    # Seconds from the start of the process until a token was answered.
    load_s: float
    pid: int
    log: Path


def servers_of(
    path: Path, found: Location, cache: Path, llama: Path, vllm_python: str | None, directory: Path
) -> list[Server]:
    """Returns the servers for a file, in the order of their turns. `cache`: the directory of their caches. `directory`:
    the weights for vLLM, which is left out without a Python."""

    def own(name: str) -> dict[str, str]:
        # torch compiles there, and splits paths at spaces.
        folder = str(cache / name.replace(" ", "-").replace(",", ""))
        return {"XDG_CACHE_HOME": folder, "VLLM_CACHE_ROOT": folder}

    ours = [
        sys.executable,
        "-m",
        "alignedserve",
        "serve",
        str(path),
        "--served-model-name",
        NAME,
        "--host",
        HOST,
    ]
    one = [*ours, "--colocated-instances", "1"]
    llama_cpp = [str(llama), "--model", str(path), "--alias", NAME, "--host", HOST]
    llama_cpp += ["--threads", str(len(os.sched_getaffinity(0))), "--no-cache-prompt", "--cache-ram", "0"]
    vllm = [str(vllm_python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(directory)]
    vllm += ["--served-model-name", NAME, "--host", HOST]
    vllm += ["--max-model-len", str(min(found.config.max_position, 8192))]
    num_bytes = _our_weights(found)
    return [
        Server(OURS, ours, PARTS, own(OURS), 2 * num_bytes),
        Server(COLOCATED, one, PARTS, own(COLOCATED), num_bytes),
        # This level of logs names the bytes of its weights.
        Server(LLAMA, [*llama_cpp, "--log-verbosity", "4"], PARTS[:2]),
        Server(LLAMA, [*llama_cpp, *SLOTS], PARTS[2:]),
        *([Server(VLLM, vllm, PARTS, PEER_ENVIRONMENT | own(VLLM))] if vllm_python else []),
    ]


def _our_weights(found: Location) -> int:
    """Returns the bytes of an instance's weights."""
    assert found.directory
    dtype = torch.bfloat16
    return num_weight_bytes(
        found.config, dtype, open_checkpoint(found.directory, dtype, "cpu", found.config.quantised)
    )


def buffers(log: str) -> float | None:
    """Returns the bytes of llama.cpp's weights."""
    sizes = re.findall(r"model buffer size = +([\d.]+) MiB", log)
    return sum(map(float, sizes)) * 2**20 if sizes else None


def write_directory(path: Path, found: Location, directory: Path) -> None:
    """Writes a file's weights in bfloat16, and its tokenizer, as a Hugging Face directory."""
    code = (
        "import sys, torch; from transformers import AutoModelForCausalLM, GgufConfig;"
        "folder, name, out = sys.argv[1:]; plain = GgufConfig(dequantize=True);"
        "model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, quantization_config=plain,"
        " dtype=torch.bfloat16); model.save_pretrained(out)"
    )
    subprocess.run([sys.executable, "-c", code, str(path.parent), path.name, str(directory)], check=True)
    assert found.directory
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((found.directory / name).read_bytes())


@contextmanager
def started(server: Server, file: Path) -> Iterator[Started]:
    """Starts the server, and yields it when it has answered one token. Stops it at the end."""
    _read(file)
    port = free_port(HOST)
    # A socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="state-", dir="/tmp", ignore_cleanup_errors=True) as state:
        command = [*server.command, "--port", str(port)]
        if server.is_ours:
            command += ["--state-dir", state, "--shutdown-timeout", "1"]
        log, url, begun_s = Path(state, "log"), f"http://{HOST}:{port}", time.perf_counter()
        with running(command, log, "", START_S, server.environment) as process:
            _first_token(url, process, log)
            yield Started(url, time.perf_counter() - begun_s, process.pid, log)


def _read(file: Path) -> None:
    """Brings the file into the page cache."""
    with file.open("rb") as stream:
        while stream.read(1 << 24):
            pass


def _first_token(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    body = {"model": NAME, "prompt": list(range(300, 308)), "max_tokens": 1, "temperature": 0}
    deadline = time.monotonic() + START_S
    with httpx2.Client(base_url=url, timeout=START_S, trust_env=False) as http:
        while True:
            try:
                answer = http.post("/v1/completions", json=body)
                if answer.status_code == httpx2.codes.OK:
                    return
                said = answer.text
            except httpx2.TransportError as error:
                said = str(error)
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(
                    f"the server answers nothing: {said}\n{log.read_text(errors='replace')[-4000:]}"
                )
            time.sleep(LOOK_S)


def memory_of(pid: int) -> dict[str, tuple[int, int]]:
    """Returns program -> (number of processes, bytes) of a process and its descendants. The bytes are the proportional
    set size: a page that processes share counts once in all."""
    num_bytes, counts = Counter[str](), Counter[str]()
    for path in processes_of(pid):
        with suppress(OSError):
            # Otherwise it has ended.
            name = (path / "comm").read_text().strip()
            num_bytes[name] += 1024 * int(
                (path / "smaps_rollup").read_text().partition("\nPss:")[2].split()[0]
            )
            counts[name] += 1
    return {name: (counts[name], num_bytes[name]) for name in counts}


def processes_of(pid: int) -> list[Path]:
    return [Path("/proc", str(each)) for each in (pid, *(child for child, _ in descendants(pid)))]
