"""The pictures in docs/architecture.md match their source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from docs import picture

LAYER_OF = {room: number for number, rooms in enumerate(picture.LAYERS.values()) for room in rooms}


@pytest.fixture(scope="module", autouse=True)
def read_once() -> Iterator[None]:
    """The imports of all files are the same for all of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(picture, "imports", cache(picture.imports))
        yield


def test_the_page_has_the_pictures_as_they_are_now() -> None:
    page = picture.PAGE.read_text()
    assert picture.with_pictures(page) == page, "make picture"


def test_every_folder_is_in_a_layer() -> None:
    assert LAYER_OF.keys() == picture.rooms().keys()


def test_no_arrow_points_up() -> None:
    for room, found in picture.imports().items():
        assert all(LAYER_OF[to] >= LAYER_OF[room] for to in found), (room, found)


def test_those_that_share_a_box_share_a_layer() -> None:
    for box in picture.boxes():
        assert len({LAYER_OF[room] for room in box}) == 1, box


def test_what_a_longer_way_implies_is_left_out() -> None:
    graph = {"a": {"b", "c", "d"}, "b": {"c"}, "c": {"d"}, "d": set(), "e": {"a", "d"}}
    assert picture.reduced(graph) == {"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": set(), "e": {"a"}}


def test_those_that_import_each_other_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set[str]()}
    assert picture.circles(graph) == {
        "a": ("a", "b", "c"),
        "b": ("a", "b", "c"),
        "c": ("a", "b", "c"),
        "d": ("d",),
        "e": ("e",),
    }


def test_all_ways_to_import_count(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text(
        "import alignedserve.cli.main, json\n"
        "from alignedserve import LLM, demo\n"
        "from alignedserve.router.policies import base\n"
        "def later():\n"
        "    from alignedserve.sim import compare\n"
    )
    assert sorted(picture.imported(source)) == ["LLM", "cli", "demo", "router", "sim"]


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="no markers of the picture"):
        picture.with_pictures("# Architecture\n")


@pytest.mark.parametrize("step", picture.WAY, ids=lambda step: f"{step.sender}-{step.message}")
def test_each_message_is_sent_and_heard(step: picture.Step) -> None:
    files = picture.rooms()
    # the router sends what its policy says
    senders = files[step.sender] + (files["scheduling"] if step.sender == "router" else [])
    assert any(step.message in made(path) for path in senders)
    assert any(step.message in named(path) for path in files[step.receiver])


@cache
def named(path: Path) -> set[str]:
    """Messages that are imported."""
    return {
        alias.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "alignedserve.protocol.messages"
        for alias in node.names
    }


@cache
def made(path: Path) -> set[str]:
    """Those of them that are constructed. In a `case` they are patterns, and no calls."""
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    # such as Report() and Report.empty()
    makers = [func.value if isinstance(func, ast.Attribute) else func for func in calls]
    return {maker.id for maker in makers if isinstance(maker, ast.Name)} & named(path)
