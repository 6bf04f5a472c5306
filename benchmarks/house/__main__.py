"""Measures the code, beside the aims that were set for it.

    python -m benchmarks.house [--show MEASURE] [--lower] [--json] [--no-journey] [--out FILE]

`--show` lists what a measure counts, such as the functions with more than seven parameters. `--lower` lowers the limits
in tests/house.toml and tests/lines.toml to what is measured. The journey is the only measure that runs code: a chat in
a whole system in virtual time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.harness import commit_of, parser_of, write_json
from benchmarks.house import measures, ratchet
from benchmarks.house.imports import all_imports, between_folders, hard_imports, rings
from benchmarks.house.likenesses import likenesses, python_files
from benchmarks.house.source import ROOT, Source, product

if TYPE_CHECKING:
    from benchmarks.house.journey import Journey

RESULTS = ROOT / "benchmarks/results/house.json"


@dataclass(frozen=True)
class Figure:
    name: str
    value: int
    # None: no aim was set.
    aim: int | None
    # What it counts, if those are more than lines.
    counted: tuple[str, ...] = ()


def _counting(name: str, counted: list[str], aim: int | None) -> Figure:
    return Figure(name, len(counted), aim, tuple(counted))


def figures(
    sources: list[Source], files: Mapping[str, str], journey: Callable[[], Journey] | None
) -> list[Figure]:
    """`files` are the texts of all Python files. `journey` follows a chat; None leaves it out."""
    hard, every = hard_imports(sources), all_imports(sources)
    router = [source.name for source in sources if source.top == "router"]
    benchmarks = [text for name, text in files.items() if name.startswith("benchmarks/")]
    return [
        Figure("lines", sum(source.num_lines for source in sources), 88_000),
        _counting("files", [source.name for source in sources], None),
        *(_of_journey(journey()) if journey else ()),
        _counting("files with block arithmetic", measures.files_with_block_arithmetic(sources), 25),
        _counting("files naming blocks", measures.files_naming_blocks(sources), 45),
        _counting("files with features", measures.files_with_features(sources), 30),
        _counting("Executor members", measures.methods(sources, "Executor"), 14),
        _counting("Engine methods", measures.methods(sources, "Engine"), 22),
        Figure("lines of benchmarks", sum(len(text.splitlines()) for text in benchmarks), 20_000),
        _counting("likenesses", likenesses(files), 83),
        _counting("router files", router, 25),
        _counting("wide functions", measures.wide_functions(sources), 20),
        *(
            _counting(f"files of {kind}", measures.touched(sources, name), aim)
            for kind, (name, aim) in measures.SAMPLES.items()
        ),
        _counting("class names used twice", measures.repeated_class_names(sources), 30),
        Figure("function p95", measures.p95_lines(sources), 20),
        _counting("hard cycles", rings(hard), 0),
        _counting("cycles with lazy and type imports", rings(every), 0),
        _counting("rings of folders", rings(between_folders(sources, hard)), 0),
    ]


def _of_journey(journey: Journey) -> list[Figure]:
    return [
        _counting("files to the first token", journey.files, 97),
        _counting("functions to the first token", journey.functions, 600),
        _counting("shapes of a chat", journey.shapes, 25),
    ]


def _print_table(found: list[Figure], lines: dict[str, int]) -> None:
    print(f"{'':36} {'now':>7} {'aim':>7}")
    for figure in found:
        aim = "" if figure.aim is None else f"{figure.aim:,}"
        print(f"{figure.name:36} {figure.value:7,} {aim:>7}")
    print(f"\n{'folder':36} {'lines':>7}")
    for folder, count in lines.items():
        print(f"{folder:36} {count:7,}")


def main() -> None:
    parser = parser_of(__doc__, out={"help": f"keep the figures, as in {RESULTS.relative_to(ROOT)}"})
    parser.add_argument("--show", metavar="MEASURE", help="list what this measure counts")
    parser.add_argument(
        "--lower", action="store_true", help="lower the limits that are above what is measured"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--no-journey", action="store_true", help="run no chat")
    options = parser.parse_args()
    sources = product()
    found = figures(sources, python_files(), None if options.no_journey else _journey)
    if options.show is not None:
        named = {figure.name: figure for figure in found}
        if options.show not in named:
            parser.error(f"--show {options.show}: must be one of {', '.join(named)}")
        print("\n".join(named[options.show].counted))
        return
    lines = measures.lines_of_folders(sources)
    if options.lower:
        ratchet.lower(ratchet.MEASURES, {figure.name: figure.value for figure in found})
        ratchet.lower(ratchet.LINES, lines)
    record = {
        "commit": commit_of(),
        "figures": {figure.name: {"now": figure.value, "aim": figure.aim} for figure in found},
        "lines": lines,
    }
    if options.json:
        print(json.dumps(record, indent=1))
    else:
        _print_table(found, lines)
    write_json(options.out, record)


def _journey() -> Journey:
    # Loaded here, because it needs the whole product, and the rest needs none of it.
    from benchmarks.house.journey import journey

    return journey()


if __name__ == "__main__":
    main()
