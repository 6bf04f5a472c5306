"""The measures of the code count what they say, on a small package whose figures are plain to see."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.house import measures
from benchmarks.house.__main__ import figures, main
from benchmarks.house.imports import all_imports, between_folders, hard_imports, rings
from benchmarks.house.source import Source, product

FILES = {
    "alignedserve/__init__.py": "",
    "alignedserve/types.py": "Key = int\n",
    "alignedserve/a/__init__.py": "",
    "alignedserve/a/one.py": """from typing import TYPE_CHECKING

from alignedserve.types import Key

if TYPE_CHECKING:
    from alignedserve.a.two import Two


class One:
    def wide(self, a, b, c, d, e, f, g, *, h: Key) -> None:
        self.keeps_inputs = a

    def narrow(self, a, b, c, d, e, f, g) -> None:
        from alignedserve.b.three import Three
""",
    "alignedserve/a/two.py": "from alignedserve.a import one\n\n\nclass Two(one.One):\n    silent = talent = 1\n",
    "alignedserve/b/__init__.py": "",
    "alignedserve/b/three.py": "from alignedserve.a.two import Two\n\n\nclass One(Two): ...\n",
    "router/__init__.py": "",
    "router/core.py": "import alignedserve.b.three\nfrom alignedserve.router import core\n",
}


@pytest.fixture
def sources(tmp_path: Path) -> list[Source]:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "alignedserve/router").symlink_to("../router")
    return product(tmp_path)


def test_each_file_is_found_once_under_its_module(sources: list[Source]) -> None:
    assert {source.name for source in sources} == FILES.keys()
    assert "alignedserve.router.core" in [source.module for source in sources]
    lines = {name: len(text.splitlines()) for name, text in FILES.items()}
    assert measures.lines_of_folders(sources) == {
        "alignedserve/a": lines["alignedserve/a/one.py"] + lines["alignedserve/a/two.py"],
        "alignedserve/b": lines["alignedserve/b/three.py"],
        "router": lines["router/core.py"],
        "alignedserve": lines["alignedserve/types.py"],
    }


def test_what_is_too_wide_or_named_twice_is_found(sources: list[Source]) -> None:
    assert measures.wide_functions(sources) == ["alignedserve/a/one.py:10 wide 8"]
    assert measures.repeated_class_names(sources) == ["One: alignedserve/a/one.py, alignedserve/b/three.py"]
    assert measures.files_with_features(sources) == ["alignedserve/a/one.py: kept inputs"]
    assert measures.p95_lines(sources) == 2


def test_files_that_name_something_are_found(sources: list[Source]) -> None:
    assert measures.touched(sources, "narrow") == ["alignedserve/a/one.py"]
    assert measures.touched(sources, "Two") == ["alignedserve/a/two.py", "alignedserve/b/three.py"]
    assert measures.touched(sources, "tow") == []


def test_rings_are_found_by_the_kind_of_import(sources: list[Source]) -> None:
    hard, every = hard_imports(sources), all_imports(sources)
    assert rings(hard) == []
    assert rings(every) == ["alignedserve.a.one, alignedserve.a.two, alignedserve.b.three"]
    assert rings(between_folders(sources, hard)) == []
    assert rings(between_folders(sources, every)) == ["alignedserve.a, alignedserve.b"]


def test_a_ring_is_the_largest_set_that_reaches_itself() -> None:
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": {"d"}, "f": {"f", "a"}}
    assert rings(graph) == ["a, b, c", "d, e"]


def test_a_figure_is_the_length_of_its_list(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sources: list[Source]
) -> None:
    monkeypatch.setattr("benchmarks.house.__main__.product", lambda: sources)
    monkeypatch.setattr(
        "benchmarks.house.__main__._journey", lambda: ["router/core.py f", "router/core.py g"]
    )
    found = {
        each.name: each.value for each in figures(sources, lambda: ["router/core.py f", "router/core.py g"])
    }
    assert found["files to the first token"] == 1 and found["functions to the first token"] == 2
    monkeypatch.setattr("sys.argv", ["house", "--json"])
    main()
    record = json.loads(capsys.readouterr().out)
    assert {name: each["now"] for name, each in record["figures"].items()} == found
    monkeypatch.setattr("sys.argv", ["house", "--show", "functions to the first token"])
    main()
    assert capsys.readouterr().out.splitlines() == ["router/core.py f", "router/core.py g"]


@pytest.mark.slow
def test_a_chat_crosses_the_gateway_the_router_and_both_workers() -> None:
    from benchmarks.house.journey import journey

    functions = journey()
    tops = {function.split("/")[0] for function in functions}
    assert {"alignedserve", "router", "prefill_worker", "kvpool"} <= tops
    assert "router/router.py Router.on" in functions
    assert not any(function.startswith(("alignedserve/sim/", "alignedserve/vopr/")) for function in functions)
