"""deploy/Dockerfile: its steps are run in a new Debian, and the result answers a question."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click
import httpx2
import pytest

from alignedserve.cli.main import cli
from alignedserve.launch.leftovers import descendants
from alignedserve.launch.ports import free_port
from tests.deploy.changes import in_turn
from tests.deploy.dockerfile import Root, Stage, parse, said_last, stages_for, steps_of, suite_of

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "deploy/Dockerfile").read_text()
START_S = 300.0


def last_stage() -> tuple[list[Stage], Stage]:
    stages = parse(TEXT)
    return stages, stages[-1]


# ---- as it is written ----


def test_an_instruction_that_is_not_known_is_an_error() -> None:
    with pytest.raises(ValueError, match="line 2: ADD is none of FROM"):
        parse("FROM debian:bookworm-slim\nADD https://example.org/x /x\n")
    with pytest.raises(ValueError, match="line 2"):
        parse("FROM debian:bookworm-slim\nRUN true && \\\n")


def test_what_it_copies_exists_and_reaches_the_builder() -> None:
    allowed = {
        line.removeprefix("!")
        for line in (ROOT / "deploy/Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = {
        word
        for stage in parse(TEXT)
        for instruction, rest in stage.steps
        if instruction == "COPY" and not rest.startswith("--from")
        for word in rest.split()[:-1]
    }
    assert copied == allowed
    assert all((ROOT / name).exists() for name in copied)


def test_the_last_stage_is_small_and_nobodys_root() -> None:
    stages, last = last_stage()
    steps = steps_of(stages, last)
    installed = " ".join(rest for instruction, rest in steps if instruction == "RUN")
    assert not re.search(r"\b(g\+\+|gcc|python3-dev|build-essential|pip)\b", installed)
    # HTTPS needs them, for webhooks as well
    assert re.search(r"\bca-certificates\b", installed)
    *_, user = [rest for instruction, rest in steps if instruction == "USER"]
    assert re.search(rf"useradd .*{user}\b", installed) and user != "root"
    assert said_last(steps, "ENTRYPOINT") == ["tini", "--", "alignedserve"]
    [command] = said_last(steps, "CMD")
    assert cli.get_command(click.Context(cli), command)
    assert "/health" in said_last(steps, "HEALTHCHECK")[-1]


def test_all_targets_have_the_same_user() -> None:
    stages, last = last_stage()
    [gpu] = [stage for stage in stages if stage.name == "gpu"]
    for stage in (gpu, last):
        *_, user = [rest for instruction, rest in steps_of(stages, stage) if instruction == "USER"]
        assert user == "alignedserve"


def test_packages_are_those_of_the_lock() -> None:
    installs = [line for line in TEXT.splitlines() if "pip install" in line]
    assert installs and all("-c requirements.lock" in line for line in installs)


# ---- as it runs ----


def mirror() -> str:
    """Returns where this machine has its packages from."""
    asked = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Component: main"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[0]


def settings_of_pip(certificates: Path) -> dict[str, str]:
    """Returns them as variables, so that pip finds packages in the root where it finds them here; without those that
    name files of this machine."""
    asked = [sys.executable, "-m", "pip", "config", "list"]
    lines = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()
    said = dict(re.findall(r"^(?:global|:env:)\.(\S+?)='(.*)'$", "\n".join(lines), re.MULTILINE))
    found = {f"PIP_{name.upper().replace('-', '_')}": value for name, value in said.items()}
    found |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    found = {
        name: value
        for name, value in found.items()
        if name == "PIP_CERT" or not any(word.startswith(("/", "file:")) for word in value.split())
    }
    if "PIP_CERT" in found:
        shutil.copy(found["PIP_CERT"], certificates)
        found["PIP_CERT"] = "/" + certificates.name
    return found


def build(directory: Path) -> Root:
    stages, last = last_stage()
    made: dict[str, Root] = {}
    for stage in [*stages_for(stages, last), last]:
        place = directory / (stage.name or "last")
        root = Root(place, suite_of(stages, stage), mirror())
        settings = settings_of_pip(place / "certificates.pem")
        # PyTorch's index cannot be reached from everywhere. PyPI's torch computes the same on a CPU.
        settings["TORCH_INDEX"] = settings.get("PIP_INDEX_URL", "https://pypi.org/simple")
        root.apply(steps_of(stages, stage), ROOT, made, settings)
        made[stage.name or "last"] = root
    return made["last"]


@contextmanager
def running(root: Root, port: int, log: Path) -> Iterator[int]:
    """Yields the id of the first process in the container."""
    stages, last = last_stage()
    steps = steps_of(stages, last)
    words = [*said_last(steps, "ENTRYPOINT"), *said_last(steps, "CMD"), "--port", str(port)]
    with log.open("wb") as output:
        outside = subprocess.Popen(root.command(words), stdout=output, stderr=subprocess.STDOUT)
    try:
        until_healthy(outside, port, log)
        [first] = Path(f"/proc/{outside.pid}/task/{outside.pid}/children").read_text().split()
        yield int(first)
        assert outside.wait(60) == 0, log.read_text()
    finally:
        outside.kill()
        outside.wait()


def until_healthy(outside: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        assert outside.poll() is None, log.read_text()
        try:
            if httpx2.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                return
        except httpx2.TransportError:
            # it does not listen yet
            time.sleep(0.2)
    raise AssertionError(f"it did not start in {START_S:g} s:\n{log.read_text()}")


def users_of(pids: list[int]) -> set[int]:
    found = set()
    for pid in pids:
        # one of Ray's may have ended since
        with suppress(FileNotFoundError):
            found.add(Path(f"/proc/{pid}").stat().st_uid)
    return found


@pytest.mark.slow
@in_turn(1)
def test_its_steps_make_a_server_that_answers(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may chroot")
    if shutil.which("debootstrap") is None:
        pytest.skip("debootstrap is not installed")
    root = build(tmp_path)
    assert (
        not (root.directory / "usr/bin/gcc").exists() and not (root.directory / "opt/venv/bin/pip").exists()
    )
    port = free_port("127.0.0.1")
    with running(root, port, tmp_path / "log") as first:
        asked = {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "max_tokens": 8}
        url = f"http://127.0.0.1:{port}/v1"
        model = httpx2.get(f"{url}/models").json()["data"][0]["id"]
        answer = httpx2.post(f"{url}/chat/completions", json={"model": model, **asked}, timeout=60.0)
        assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"]
        stages, last = last_stage()
        check = [word.replace("8000", str(port)) for word in said_last(steps_of(stages, last), "HEALTHCHECK")]
        subprocess.run(root.command(check), check=True)
        assert "using torch instead" not in (tmp_path / "log").read_text()
        assert users_of([first, *(pid for pid, _ in descendants(first))]) == {10001}
        # as `docker stop` does it
        os.kill(first, signal.SIGTERM)
    # the other target is this one with a compiler, and with torch for CUDA
    [gpu] = [stage for stage in parse(TEXT) if stage.name == "gpu"]
    root.apply([step for step in gpu.steps if step[0] != "COPY"], ROOT, {}, {})
    subprocess.run(root.command(["g++", "--version"]), check=True)
