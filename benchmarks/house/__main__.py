"""Measures the code, beside the aims that were set for it.

    python -m benchmarks.house [--show MEASURE] [--json] [--no-journey] [--out FILE]

`--show` lists what a measure counts, such as the functions with more than seven parameters. The journey is the only
measure that runs code: a chat in a whole system in virtual time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.harness import commit_of, parser_of, write_json
from benchmarks.house import measures
from benchmarks.house.imports import all_imports, between_folders, hard_imports, rings
from benchmarks.house.source import ROOT, Source, product

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


def figures(sources: list[Source], journey: Callable[[], list[str]] | None) -> list[Figure]:
    """`journey` returns the functions that a chat crosses; None leaves them out."""
    hard, every = hard_imports(sources), all_imports(sources)
    router = [source.name for source in sources if source.top == "router"]
    found = [
        Figure("lines", sum(source.num_lines for source in sources), 74_000),
        _counting("files", [source.name for source in sources], None),
    ]
    if journey:
        functions = journey()
        files = sorted({function.split()[0] for function in functions})
        found += [
            _counting("files to the first token", files, 80),
            _counting("functions to the first token", functions, None),
        ]
    return [
        *found,
        _counting("router files", router, 25),
        _counting("wide functions", measures.wide_functions(sources), 20),
        _counting("files with features", measures.files_with_features(sources), 15),
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
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--no-journey", action="store_true", help="run no chat")
    options = parser.parse_args()
    sources = product()
    found = figures(sources, None if options.no_journey else _journey)
    if options.show is not None:
        named = {figure.name: figure for figure in found}
        if options.show not in named:
            parser.error(f"--show {options.show}: must be one of {', '.join(named)}")
        print("\n".join(named[options.show].counted))
        return
    lines = measures.lines_of_folders(sources)
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


def _journey() -> list[str]:
    # Loaded here, because it needs the whole product, and the rest needs none of it.
    from benchmarks.house.journey import journey

    return journey()


if __name__ == "__main__":
    main()
