"""The measures of the code count what they say, on a small package whose figures are plain to see."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.house import measures, ratchet
from benchmarks.house.__main__ import figures, main
from benchmarks.house.imports import all_imports, between_folders, hard_imports, rings
from benchmarks.house.journey import Journey, journey
from benchmarks.house.likenesses import likenesses
from benchmarks.house.ratchet import Limit
from benchmarks.house.shapes import Shapes
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
    way = Journey(["router/core.py f", "router/core.py g"], ["str: router/core.py f"])
    monkeypatch.setattr("benchmarks.house.__main__.python_files", lambda: {"benchmarks/a.py": "a\n\nb\n"})
    monkeypatch.setattr("benchmarks.house.__main__._journey", lambda: way)
    found = {each.name: each.value for each in figures(sources, {"benchmarks/a.py": "a\n\nb\n"}, lambda: way)}
    assert found["lines of benchmarks"] == 3 and found["shapes of a chat"] == 1
    assert found["files to the first token"] == 1 and found["functions to the first token"] == 2
    monkeypatch.setattr("sys.argv", ["house", "--json"])
    main()
    record = json.loads(capsys.readouterr().out)
    assert {name: each["now"] for name, each in record["figures"].items()} == found
    monkeypatch.setattr("sys.argv", ["house", "--show", "functions to the first token"])
    main()
    assert capsys.readouterr().out.splitlines() == ["router/core.py f", "router/core.py g"]


COUNTS = """class Executor:
    num_passed: int

    def fits(self) -> bool:
        return self.num_columns > 1

    async def adopt(self) -> None: ...
"""


def test_files_that_count_blocks_are_found() -> None:
    names = Source(
        "kv/names.py", "kv.names", "class Names:\n    block_size: int\n    num_columns_s = num_passed\n"
    )
    counts = Source("kv/counts.py", "kv.counts", COUNTS)
    slices = Source("kv/slices.py", "kv.slices", "rows[: each.block_size]\n")
    other = Source("kv/other.py", "kv.other", "num_blocks = max_num_columns + min(a, b)\n")
    sources = [names, counts, slices, other]
    assert measures.files_naming_blocks(sources) == ["kv/names.py", "kv/counts.py", "kv/slices.py"]
    assert measures.files_with_block_arithmetic(sources) == ["kv/counts.py", "kv/slices.py"]
    assert measures.methods(sources, "Executor") == ["kv/counts.py:4 fits", "kv/counts.py:7 adopt"]


def code(name: str, number: int) -> str:
    return "".join(f"    {name}.step_{step}({number}, 'of {name}')  # {number}\n" for step in range(6))


def test_a_run_of_lines_that_differ_in_literals_is_a_likeness() -> None:
    first = f"import one\n\ndef first():\n{code('part', 1)}"
    second = f"def second():\n    other()\n\n{code('part', 2)}    part.end()\n"
    third = f"{code('part', 3)}\n{code('whole', 4)}"
    found = likenesses({"a.py": first, "b.py": second, "c.py": third})
    assert found == ["b.py:4 6 = a.py:4", "c.py:1 6 = a.py:4"]


def test_a_longer_run_is_one_likeness_and_a_shorter_one_is_none() -> None:
    text = code("part", 1) + code("whole", 2)
    assert likenesses({"a.py": text, "b.py": f"begin()\n{text}"}) == ["b.py:2 12 = a.py:1"]
    assert likenesses({"a.py": text, "b.py": "\n".join(text.splitlines()[:5])}) == []


def test_a_list_of_lines_that_are_all_alike_is_none() -> None:
    assert likenesses({"a.py": "".join(f"row({number})\n" for number in range(11))}) == []


@dataclass(frozen=True)
class Record:
    key: int
    parts: list[object]


def test_a_shape_is_what_contains_the_chat() -> None:
    shapes = Shapes(("the prompt",), [7, 8, 9])
    shapes.look(Record(5, ["another"]), "first")
    shapes.look({"text": "of the prompt", "n": 1}, "second")
    # its key is not known yet
    shapes.look({"key": 5}, "third")
    shapes.look(Record(5, [7, 8, 9]), "fourth")
    shapes.look({"keys": [5]}, "fifth")
    shapes.look({5: "by key"}, "sixth")
    assert shapes.names() == [
        "dict of keys: fifth",
        "dict of n, text: second",
        f"{Record.__module__}.Record: fourth",
    ]


def test_a_limit_falls_with_its_value_and_never_rises(tmp_path: Path) -> None:
    path = tmp_path / "limits.toml"
    path.write_text(
        '# Limits.\n[measures]\n"a b" = { limit = 3_000, lowest = 2_000, adr = 9 }\nc = { limit = 5, lowest = 5 }\n'
    )
    ratchet.lower(path, {"a b": 2500, "c": 9})
    assert ratchet.read(path) == {"a b": Limit(2505, 2000, 9), "c": Limit(5, 5)}
    ratchet.lower(path, {"a b": 1000})
    assert path.read_text().splitlines()[:3] == [
        "# Limits.",
        "[measures]",
        '"a b" = { limit = 1_002, lowest = 1_002 }',
    ]


def test_what_breaks_a_limit_is_named_with_both_numbers(tmp_path: Path) -> None:
    (tmp_path / "docs/adr").mkdir(parents=True)
    (tmp_path / "docs/adr/0070-why.md").touch()
    limits = {
        "a": Limit(100, 100),
        "b": Limit(100, 90, adr=70),
        "c": Limit(100, 90),
        "d": Limit(100, 90, adr=71),
    }

    def names(**values: int) -> list[str]:
        return [fault.split(",")[0] for fault in ratchet.faults(values, limits, tmp_path)]

    raised = ["c: its limit of 100 was raised from 90", "d: its limit of 100 was raised from 90"]
    assert names(a=98, b=100, c=99, d=100) == raised
    assert names(a=101, b=97, c=99, d=100) == ["a: it is 101", "b: it is 97", *raised]
    assert names(b=100, c=100, d=100, e=1) == ["e: it is 1 and has no limit", "a: it has a limit", *raised]


def test_a_chat_crosses_the_gateway_the_router_and_both_workers() -> None:
    way = journey()
    tops = {function.split("/")[0] for function in way.functions}
    assert {"alignedserve", "router", "prefill_worker", "kvpool"} <= tops
    assert "router/router.py Router.on" in way.functions
    assert not any(
        function.startswith(("alignedserve/sim/", "alignedserve/vopr/")) for function in way.functions
    )
    shapes = {shape.split(":")[0].rpartition(".")[2] for shape in way.shapes}
    assert {"bytes", "ChatBody", "Submit", "RequestState", "NewTokens", "ChoiceDelta"} <= shapes
