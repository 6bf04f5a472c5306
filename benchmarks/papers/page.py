"""The results as a page, and as a table for a terminal."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.papers import plots
from benchmarks.papers.catalogue import PAPERS
from benchmarks.papers.claim import Finding
from benchmarks.papers.datasets import ALL
from benchmarks.papers.verdict import ENOUGH, NOISE, Verdict

WIDTH = 60
HEAD = """# Five papers' figures, and ours

{commands}

{runs}

{counts}

| verdict | meaning |
| --- | --- |
| **reproduced** | at least {enough:.0%} of the paper's gain |
| **partly** | less of it, or only some parts of the claim |
| **refuted** | no gain, or the reverse; {noise:.0%} either way is noise |

The systems with which papers compare are scheduling policies here, on the same simulated engine. vLLM is `fcfs` on
colocated instances, DistServe is `fcfs` on separate ones, and FastGen and Sarathi-Serve are `sarathi`. Our figures are
medians of the seeds. `--quick` runs a third of the requests and seconds that are given below.
"""


def write(findings: Sequence[Finding], runs: Sequence[Mapping[str, Any]], out: Path) -> None:
    out.joinpath("papers.md").write_text(markdown(findings, runs))
    plots.draw_all(findings, out)


def markdown(findings: Sequence[Finding], runs: Sequence[Mapping[str, Any]]) -> str:
    commands = "```sh\n" + "\n".join(str(run["command"]) for run in runs) + "\n```"
    said = "\n".join(
        f"- {run['date']} at {str(run['commit'])[:12]}, {run['num_cpus']} cores, {run['minutes']} minutes"
        for run in runs
    )
    counts = Counter(finding.verdict for finding in findings)
    counted = "{} claims: {}.".format(
        len(findings), ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])
    )
    head = HEAD.format(commands=commands, runs=said, counts=counted, enough=ENOUGH, noise=NOISE)
    sections = [_section(name, findings) for name in PAPERS if any(each.paper == name for each in findings)]
    return "\n".join([head, "![Claims by verdict](papers.png)\n", *sections, _datasets()])


def _section(name: str, findings: Sequence[Finding]) -> str:
    some = [each for each in findings if each.paper == name]
    lines = [
        f"## {PAPERS[name].title}",
        "",
        "| claim | the paper | ours | verdict | why |",
        "| --- | --- | --- | --- | --- |",
    ]
    for each in some:
        cells = (each.text, each.figure, each.ours + _spread(each), f"**{each.verdict}**", each.reason)
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    lines += ["", "How ours were obtained, with the claims and the papers' setups:", ""]
    by_how: dict[str, list[str]] = {}
    for each in some:
        if each.how:
            by_how.setdefault(each.how, []).append(f"{each.text} ({each.setup})")
    for how, names in by_how.items():
        lines += [f"- {how}.", *(f"  - {name}" for name in names)]
    return "\n".join([*lines, ""])


def _spread(finding: Finding) -> str:
    """Shows the range of the first number if there are several seeds."""
    values = next(iter(finding.numbers.values()), [])
    if len(values) < 2:
        return ""
    name = next(iter(finding.numbers))
    return f"; {name.replace('_', ' ')} by seed: {min(values):.2f} to {max(values):.2f}"


def _datasets() -> str:
    lines = [
        "## Made data",
        "",
        "No dataset is shipped. Lengths are drawn, log-normally unless stated otherwise:",
        "",
    ]
    lines += [f"- {each.name}: {each.source}." for each in ALL]
    return "\n".join([*lines, ""])


def terminal(findings: Sequence[Finding]) -> str:
    """Returns a table of claim, paper's figure, our figure and verdict, with the reason and the method below each
    row."""
    lines = []
    for each in findings:
        rows = [textwrap.wrap(text, WIDTH) or [""] for text in (each.text, each.figure, each.ours)]
        head = f"{each.paper}: "
        rows[0] = textwrap.wrap(head + each.text, WIDTH)
        for index in range(max(map(len, rows))):
            cells = [row[index] if index < len(row) else "" for row in rows]
            verdict = f" {each.verdict}" if not index else ""
            lines.append("  ".join(f"{cell:{WIDTH}}" for cell in cells) + verdict)
        for text in filter(None, (each.reason, each.how)):
            lines += textwrap.wrap(text, 3 * WIDTH, initial_indent="    ", subsequent_indent="    ")
        lines.append("")
    return "\n".join(lines)
