"""deploy/compose.yaml: everything it names exists, and nothing is open beyond the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from alignedserve.cli.serve import command

FOLDER = Path(__file__).parents[2] / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVER: dict[str, Any] = COMPOSE["services"]["alignedserve"]


def test_the_server_is_started_with_options_that_exist() -> None:
    first, *arguments = SERVER["command"]
    assert first == "serve"
    options = command.make_context("serve", arguments).params
    # beyond the container, where only those with a key are answered
    assert options["host"] == "0.0.0.0"  # noqa: S104
    assert options["api_key_file"]
    assert options["redis_url"].split("/")[2].split(":")[0] in COMPOSE["services"]


def test_the_directory_of_the_keys_is_mounted_and_not_their_file() -> None:
    """A mounted file stays the same one when another is renamed over it, so that a revoked key would stay valid."""
    assert "secrets" not in COMPOSE and "secrets" not in SERVER
    file = Path(command.make_context("serve", SERVER["command"][1:]).params["api_key_file"])
    [source] = [
        source
        for source, target, mode in (
            volume.split(":") for volume in SERVER["volumes"] if volume.count(":") == 2
        )
        if target == str(file.parent) and mode == "ro"
    ]
    # as in the commands at the top, and not in git
    directory = f"deploy/{Path(source)}"
    text = (FOLDER / "compose.yaml").read_text()
    assert f"install -d -m 700 -o 10001 {directory} " in text and f" {directory}/{file.name} " in text
    assert f"/{directory}/" in (FOLDER.parent / ".gitignore").read_text().splitlines()
    dockerfile = (FOLDER / "Dockerfile").read_text()
    assert " --uid 10001 " in dockerfile and "\nUSER alignedserve\n" in dockerfile


def test_ports_are_open_on_the_host_only() -> None:
    published = [port for service in COMPOSE["services"].values() for port in service.get("ports", [])]
    assert published == ["127.0.0.1:8000:8000"]


def test_what_is_kept_is_in_volumes() -> None:
    sources = {volume.split(":")[0] for each in COMPOSE["services"].values() for volume in each["volumes"]}
    assert {each for each in sources if not each.startswith("./")} == set(COMPOSE["volumes"])
    redis = COMPOSE["services"]["redis"]["command"]
    assert redis[redis.index("--appendonly") + 1] == "yes"


def test_it_is_built_from_the_dockerfile_here() -> None:
    context = (FOLDER / SERVER["build"]["context"]).resolve()
    assert (context / SERVER["build"]["dockerfile"]).samefile(FOLDER / "Dockerfile")
    with_gpus = yaml.safe_load((FOLDER / "compose.gpu.yaml").read_text())["services"]
    assert with_gpus.keys() == {"alignedserve"}
    assert f" AS {with_gpus['alignedserve']['build']['target']}\n" in (FOLDER / "Dockerfile").read_text()
