"""The files for `ray up`, as Ray's own code prepares and checks them; and the command that they end in."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from alignedserve.cli.serve import command
from alignedserve.models.locate import SMALL_FILES, WEIGHT_FILES

ROOT = Path(__file__).parents[2]
FILES = ["cluster.yaml", "deploy/cluster.local.yaml"]


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / name).read_text())
    return found


def served(config: dict[str, Any]) -> dict[str, Any]:
    """The options of `alignedserve serve` on the head."""
    *_, start = config["head_start_ray_commands"]
    words = shlex.split(start)
    assert words[-1] == "&"
    arguments = words[words.index("serve") + 1 : words.index(">")]
    return command.make_context("serve", arguments).params


@pytest.mark.parametrize("name", FILES)
def test_ray_accepts_the_file(name: str) -> None:
    prepared = prepare_config(load(name))
    validate_config(prepared)
    assert prepared["max_workers"] >= 1


def test_aws_has_a_head_and_gpu_nodes_that_start_at_once() -> None:
    types = prepare_config(load("cluster.yaml"))["available_node_types"]
    assert types["gpu"]["min_workers"] == 1
    assert types["head"]["min_workers"] == 0


@pytest.mark.parametrize("name", FILES)
def test_the_head_ends_in_a_service_with_options_that_exist(name: str) -> None:
    config = load(name)
    parsed = served(config)
    assert parsed["address"] == "auto" and parsed["model"]
    assert parsed["min_islands"] <= prepare_config(config)["max_workers"] + 1


@pytest.mark.parametrize("name", FILES)
def test_every_ray_is_behind_the_token(name: str) -> None:
    config = load(name)
    starts = [
        line
        for line in config["head_start_ray_commands"] + config["worker_start_ray_commands"]
        if "ray start" in line or "alignedserve serve" in line
    ]
    assert len(starts) == 3 and all("RAY_AUTH_MODE=token" in line for line in starts)
    assert "~/.ray/auth_token" in config["file_mounts"]


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_installed_by_a_script_from_the_web(name: str) -> None:
    config = load(name)
    lines = [line for key in config if key.endswith("setup_commands") for line in config[key]]
    assert not [line for line in lines if re.search(r"\b(curl|wget|uv)\b|https?://", line)]
    assert "check_host.py" in lines[0]


def test_gpu_nodes_are_checked_for_what_serve_asks_of_them() -> None:
    config = load("cluster.yaml")
    options = served(config)
    [line] = [line for line in config["worker_start_ray_commands"] if "check_host.py" in line]
    words = shlex.split(line)
    assert int(words[words.index("--gpus") + 1]) == options["prefill_instances"] + options["decode_instances"]
    assert int(words[words.index("--pool-memory-bytes") + 1]) == options["pool_memory_bytes"]


def test_weights_are_fetched_once_per_node_to_where_instances_look() -> None:
    config = load("cluster.yaml")
    *_, fetch = config["worker_setup_commands"]
    home, _, _, _, model, *words = shlex.split(fetch)
    assert model == served(config)["model"]
    assert {after for word, after in pairwise(words) if word == "--include"} == {
        *SMALL_FILES,
        *WEIGHT_FILES,
    }
    [start] = [line for line in config["worker_start_ray_commands"] if "ray start" in line]
    assert home in start


def test_the_command_in_the_file_names_an_image_for_each_node(tmp_path: Path) -> None:
    """With an `aws` that knows one image of each kind; and with one that knows none, nothing is written."""
    text = (ROOT / "cluster.yaml").read_text()
    lines = [line.removeprefix("#   ") for line in text.splitlines() if line.startswith("#   ")]
    first = next(i for i, line in enumerate(lines) if line.startswith("image()"))
    script = "\n".join(lines[first : first + 4]).replace("> my-cluster.yaml", f"> {tmp_path}/my-cluster.yaml")
    aws = tmp_path / "aws"
    environment = dict(os.environ, PATH=f"{tmp_path}:{os.environ['PATH']}")

    def run(answer: str) -> int:
        aws.write_text("#!/bin/sh\n" + answer)
        aws.chmod(0o755)
        return subprocess.run(
            ["bash", "-c", script], cwd=ROOT, env=environment, capture_output=True
        ).returncode

    assert run("exit 254") != 0
    assert not (tmp_path / "my-cluster.yaml").exists()
    assert run('case "$6" in */canonical/*) echo ami-0aa;; */deeplearning/*) echo ami-0bb;; esac') == 0
    types = yaml.safe_load((tmp_path / "my-cluster.yaml").read_text())["available_node_types"]
    assert types["head"]["node_config"]["ImageId"] == "ami-0aa"
    assert types["gpu"]["node_config"]["ImageId"] == "ami-0bb"
