"""One tree of settings: each flag of `serve` belongs to one section and sets its value there."""

from __future__ import annotations

from collections import Counter
from dataclasses import MISSING, fields
from operator import attrgetter
from pathlib import Path
from typing import Annotated, get_origin, get_type_hints

import click
import pytest

from alignedserve import demo
from alignedserve.cli.doctor.command import command as doctor
from alignedserve.cli.serve import command as serve
from alignedserve.launch.settings import NO_FLAGS, sections, settings_of


def flags() -> list[str]:
    """The flags that the sections have, by their names."""
    return [
        f"{section.prefix}{each.name}"
        for section in sections()
        for each in fields(section.config_class)
        if each.default is not MISSING and each.name not in NO_FLAGS
        if get_origin(get_type_hints(section.config_class, include_extras=True)[each.name]) is Annotated
    ]


def test_each_flag_is_one_sections() -> None:
    assert max(Counter(flags()).values()) == 1


@pytest.mark.parametrize("command", [serve, doctor])
def test_commands_have_all_flags(command: click.Command) -> None:
    options = {each.name for each in command.params if isinstance(each, click.Option)}
    assert set(flags()) <= options
    # doctor's own are about where to look and how to say it
    assert command is doctor or options == set(flags())


@pytest.mark.parametrize(
    ("flag", "value", "place"),
    [
        ("port", 9000, "http.port"),
        ("api_key_file", "/keys", "keys.api_key_file"),
        ("colocated_instances", 2, "launch.colocated_instances"),
        ("slo_priority_tbt_ms", 20.0, "slo.priority_tbt_ms"),
        ("batch_max_num_lines", 7, "batches.max_num_lines"),
        ("length_predictor", "none", "lengths.predictor"),
        ("log_format", "json", "log.format"),
        ("log_dir", "/logs", "log.dir"),
        ("max_body_bytes", 1000, "limits.max_body_bytes"),
        ("link", "ipc", "router.link"),
        ("policy", "fcfs", "scheduling.policy"),
        ("block_size", 32, "engine.block_size"),
        ("served_model_name", "mine", "served_name"),
    ],
)
def test_what_a_flag_says_is_in_its_section(flag: str, value: object, place: str) -> None:
    assert attrgetter(place)(settings_of("model", {flag: value})) == value
    assert attrgetter(place)(settings_of("model", {})) != value


def test_the_demo_model_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for model in (None, "demo"):
        found = settings_of(model, {})
        assert (found.engine.model, found.served_name) == (str(demo.MODEL_DIR), "demo")
    assert settings_of("demo", {"served_model_name": "mine"}).served_name == "mine"
    assert settings_of("other/demo", {}).engine.model == "other/demo"
    # a directory of one's own comes first
    (tmp_path / "demo").mkdir()
    assert settings_of("demo", {}).engine.model == "demo"
