"""Measures the requested papers. DIR/papers.json and the page are rewritten after every experiment."""

from __future__ import annotations

import os
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import FOLDER, ROOT, facts, parser_of, progress, say
from research import papers
from research.papers import page
from research.papers.catalogue import PAPERS
from research.papers.claim import Size
from research.papers.record import Record
from research.papers.run import Done, Measured, Task, run, tasks


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    args = parser.parse_args(arguments)
    names = args.paper or list(PAPERS)
    try:
        wanted = tasks(names, Size(args.quick, args.azure_trace, args.answers, args.seeds), args.claim)
    except ValueError as error:
        parser.error(str(error))
    args.out.mkdir(parents=True, exist_ok=True)
    record = Record.at(args.out / "papers.json")
    todo = [] if args.page_only else [each for each in wanted if not (args.goes_on and record.has(each))]
    if todo:
        record.begin(facts({args.out: "OUT"}) | {"minutes": 0.0})
        _measure(todo, args.processes, record)
    findings = record.findings()
    print(page.terminal([each for each in findings if each.paper in names]))
    page.write(findings, record.runs, args.out)


def _measure(todo: Sequence[Task], num_processes: int, record: Record) -> None:
    begun_s = time.monotonic()
    with progress(len(todo), "run") as bar:
        bar.set_description(f"{len(todo)} runs in {num_processes} processes")

        def told(done: Done) -> None:
            bar.update()
            say(f"{done.task}: {done.took_s:.0f} s, {done.cpu_s:.0f} of a processor")

        for each in run(todo, num_processes, told):
            _note(each, record)
            record.runs[-1]["minutes"] = round((time.monotonic() - begun_s) / 60, 1)
            record.write()
            page.write(record.findings(), record.runs, record.path.parent)


def _note(measured: Measured, record: Record) -> None:
    for name, by_seed in measured.numbers.items():
        record.add(measured.paper, name, by_seed)
    said = set()
    for each in record.findings():
        if each.paper == measured.paper and each.claim in measured.numbers:
            said.add(each.claim)
            say(f"{each.paper}, {each.text}: {each.figure}; ours: {each.ours}: {each.verdict}")
    if unsaid := measured.numbers.keys() - said:
        raise RuntimeError(
            f"{measured.paper}: {', '.join(unsaid)}: a text names numbers that were not measured"
        )


def _parser() -> ArgumentParser:
    parser = parser_of(papers.__doc__, out=FOLDER | {"default": ROOT / "benchmarks" / "results"})
    parser.add_argument("--quick", action="store_true", help="a third of the requests, one seed")
    parser.add_argument(
        "--seeds", type=int, help="number of seeds for each experiment [default: 2, or 1 with --quick]"
    )
    parser.add_argument(
        "--paper", action="append", choices=list(PAPERS), help="may be given several times [default: all]"
    )
    parser.add_argument(
        "--claim", action="append", help="only runs that measure this claim; may be given several times"
    )
    parser.add_argument("--continue", action="store_true", dest="goes_on", help="skip what OUT already has")
    parser.add_argument("--processes", type=int, default=min(os.cpu_count() or 1, 2))
    parser.add_argument("--page-only", action="store_true", help="only rewrite the page from papers.json")
    parser.add_argument(
        "--azure-trace", type=Path, help="trace in Azure's format: its lengths replace the generated ones"
    )
    parser.add_argument("--answers", type=Path, help="JSON lines to predict lengths on")
    return parser


if __name__ == "__main__":
    main()
