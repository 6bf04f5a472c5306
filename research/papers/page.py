"""The results as a page, and as a table for a terminal."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from research.papers import plots
from research.papers.catalogue import PAPERS
from research.papers.claim import Finding
from research.papers.datasets import ALL
from research.papers.verdict import ENOUGH, NOISE, Verdict

WIDTH = 60
HEAD = """# Five papers' figures, and ours

{commands}

{runs}

{counts}

| verdict | meaning |
| --- | --- |
| **reproduced** | at least {enough:.0%} of the paper's gain at each point that the row judges |
| **partly** | less of it, or only at some points, even if their mean is enough |
| **refuted** | no gain, or the reverse; {noise:.0%} either way is noise |

The systems with which papers compare are scheduling policies here, on the same simulated engine. On colocated
instances, vLLM is `prompts-first` (in `research/papers/baselines.py`) where the paper's computed prompts in
iterations of their own. Where it cut them into chunks, it is `fcfs`. DistServe is `fcfs` on separate instances, and
FastGen and Sarathi-Serve are `sarathi`. Except beside AlignedServe, these compute again what they preempt, as vLLM
does. The papers' own policies are ours as they are, and keep that KV. Our figures are medians of the seeds. `--quick`
runs a third of the requests and seconds that are given below.

Some workloads and baselines differ from those of earlier records, because they did not do what the paper's do:

- ALISE, BROS, Apt-Serve: vLLM had chunks of prompts beside decodes, and kept the KV of preempted requests.
- ALISE: a gain of "up to" is the most over several rates, as in the paper, and no longer that at one rate.
- BROS: rates are 3, 6 and 9/s in place of 5 and 10. The paper goes up to 15/s. At 10/s, real time alone fills the
  machine with ShareGPT and leaves best effort nothing. At lower rates best effort loses less, so each rate is judged,
  with LMSYS-Chat-1M also 12 and 15/s. Blocks are shared from both ends, as in the paper. Without that, no request takes
  the blocks of another. Packing is measured without shared blocks, beside `priority`, which has none. Traces take ten
  minutes, as in the paper.
- AccelGen: objectives of 140 to 230 ms bound nothing while iterations took 30 ms. Now iterations take longer and have
  more tokens, about as in the paper's figures 3 and 4. Answers were shortened for that, so the gain in time is also
  judged with the paper's. Windows of jobs are measured. Sarathi-Serve's chunks are fixed.
- Apt-Serve: prompts of LongBench vary more, as the paper says. They are short enough for Sarathi-Serve at 1.5/s. Rates
  are those of OPT-13B and OPT-66B, because the paper gives means over models. The larger model leaves less memory.
- AlignedServe: iterations wait for the KV of requests that join (3.4). Batches mix by the paper's three cases, with the
  memory of its model: the old batch leaves first, and the next one joins only when the pool has no similar requests.
  With the buffer of earlier records, a tenth of the blocks, the share is as high as it was then on LongBench.

A claim is reproduced if each point that its row judges is. Points are the paper's figures, and the rates, models or
sizes that had to be chosen here because the paper's text does not state its own. Each claim's run, by date and commit,
is named below the tables. The simulator changed after some of them.
"""


def write(findings: Sequence[Finding], runs: Sequence[Mapping[str, Any]], out: Path) -> None:
    out.joinpath("papers.md").write_text(markdown(findings, runs))
    plots.draw_all(findings, out)


def markdown(findings: Sequence[Finding], runs: Sequence[Mapping[str, Any]]) -> str:
    commands = "```sh\n" + "\n".join(_today(run["command"]) for run in runs) + "\n```"
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


def _today(command: str) -> str:
    """Returns the command under its name of today. Runs until November 2026 have an older one."""
    return command.replace("benchmarks.papers", "research.papers")


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
    if missing := _missing(name, {each.claim for each in some}):
        lines += ["", "Not measured yet with the present workloads and baselines:", ""]
        lines += [f"- {text}" for text in missing]
    lines += ["", "How ours were obtained, with the claims and the papers' setups:", ""]
    by_how: dict[str, list[str]] = {}
    for each in some:
        if each.how:
            by_how.setdefault(each.how, []).append(f"{each.text} ({each.setup}{_size(each)})")
    for how, names in by_how.items():
        lines += [f"- {how}.", *(f"  - {name}" for name in names)]
    return "\n".join([*lines, ""])


def _missing(name: str, found: Collection[str]) -> list[str]:
    """Returns the texts of claims without numbers."""
    claims = [claim for experiment in PAPERS[name].experiments for claim in experiment.claims]
    return [claim.text for claim in claims if claim.name not in found]


def _size(finding: Finding) -> str:
    """Says how much was measured; nothing for a finding of an earlier record, whose numbers are not known."""
    num_seeds = len(next(iter(finding.numbers.values()), []))
    if not num_seeds:
        return ""
    seeds = "1 seed" if num_seeds == 1 else f"{num_seeds} seeds"
    parts = [seeds, "with --quick" if finding.is_quick else "", finding.measured]
    return f"; ours: {', '.join(filter(None, parts))}"


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
