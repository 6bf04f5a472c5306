"""The files for `ray up`, as Ray's own code prepares and checks them; and the command that they end in."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from alignedserve.cli.serve import command

ROOT = Path(__file__).parents[2]
FILES = ["cluster.yaml", "deploy/cluster.local.yaml"]


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / name).read_text())
    return found


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
    *_, start = config["head_start_ray_commands"]
    words = shlex.split(start)
    assert words[-1] == "&"
    arguments = words[words.index("serve") + 1 : words.index(">")]
    parsed = command.make_context("serve", arguments).params
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
