"""The page: what was lost, and a table for each file. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.harness import heading, table
from benchmarks.real_models.figures import CHAT_PROMPT, NUM_LINES, PROMPTS, STREAM_PROMPT, STREAMS
from benchmarks.real_models.servers import COLOCATED, OURS

# The figures of a server in one round: file, server, round, figures.
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Kind:
    title: str
    # Converts a figure to the unit in the title.
    scale: float = 1.0
    num_digits: int = 0
    # More is better.
    is_rate: bool = False


def _of_chats(title: str, name: str) -> dict[str, Kind]:
    return {
        f"alone_{name}": Kind(f"chats alone: {title}, ms", 1e3),
        f"beside_{name}": Kind(f"chats beside best effort: {title}, ms", 1e3),
        f"ratio_{name}": Kind(f"the same, of that alone: {title}", num_digits=2),
    }


KINDS: dict[str, Kind] = {
    "first_start_s": Kind("first token of the very first start, s", num_digits=1),
    "load_s": Kind("first token of later starts, s", num_digits=1),
    "pss_bytes": Kind("memory when idle, MB", 1e-6),
    "num_processes": Kind("processes"),
    "weight_bytes": Kind("weights, MB", 1e-6),
    **{f"ttft_s_{length}": Kind(f"prompt of {length:,}: TTFT, ms", 1e3) for length in PROMPTS},
    **{f"prompt_rate_{length}": Kind(f"prompt of {length:,}: tokens/s", is_rate=True) for length in PROMPTS},
    **{f"rate_{count}": Kind(f"streams, {count}: tokens/s", is_rate=True) for count in STREAMS},
    **{
        f"pace_{count}": Kind(f"streams, {count}: tokens/s after first tokens", is_rate=True)
        for count in STREAMS
    },
    **_of_chats("TTFT p50", "ttft_p50_s"),
    **_of_chats("TTFT p99", "ttft_p99_s"),
    **_of_chats("gap p99", "gap_p99_s"),
    "job_rate": Kind("best effort beside chats: tokens/s", is_rate=True),
}


def rounds_of(rows: Sequence[Row], file: str, server: str, name: str) -> dict[int, float]:
    """Returns round -> figure."""
    return {
        row["round"]: row["figures"][name]
        for row in rows
        if (row["file"], row["server"]) == (file, server) and row["figures"].get(name) is not None
    }


def ratios(rows: Sequence[Row], file: str, ours: str, peer: str, name: str) -> list[float]:
    """Returns how many times better ours is, in each round that has both."""
    one, other = (rounds_of(rows, file, server, name) for server in (ours, peer))
    found = [one[number] / other[number] for number in one if number in other]
    return found if KINDS[name].is_rate else [1 / each for each in found]


def page(about: Mapping[str, Any], rows: Sequence[Row]) -> str:
    versions = ", ".join(about["versions"].values())
    others = f"others used at most {max(row['others'] for row in rows):.0%} of the machine"
    head = heading("Real models beside other servers", about, versions, f"{about['rounds']} rounds", others)
    text = f"""\
Figures are medians of rounds. A ratio says how many times better ours is, and is above 1 for ours: median, and least to
most of the rounds. Times and memory are better when they are lower. `{OURS}` is as it starts by default, with a
prefill and a decode instance of one thread each. `{COLOCATED}` is one instance with two threads. Prompts of streams
have {STREAM_PROMPT} tokens, those of chats and best effort {CHAT_PROMPT}. {NUM_LINES} best-effort requests are always
in flight. Memory is the proportional set size of all processes. [The notes](beside_other_servers.md) say more."""
    files = list(dict.fromkeys(row["file"] for row in rows))
    tables = [f"## {file}\n\n{of_file(rows, file)}" for file in files]
    return "\n\n".join((head, text, "## Lost", lost(rows, files), *tables)) + "\n"


def lost(rows: Sequence[Row], files: Sequence[str]) -> str:
    """Returns a table of all figures in which the default server is behind, the furthest first."""
    found = []
    for file in files:
        for peer in peers_of(rows, file):
            for name, kind in KINDS.items():
                ours, colocated = (ratios(rows, file, each, peer, name) for each in (OURS, COLOCATED))
                if ours and median(ours) < 1:
                    cells = (file, peer, kind.title, shown(ours), shown(colocated))
                    found.append((median(ours), cells))
    if not found:
        return "Nothing."
    head = ("file", "beside", "figure", f"ratio of `{OURS}`", f"ratio of `{COLOCATED}`")
    return table(head, [cells for _, cells in sorted(found)], 3)


def peers_of(rows: Sequence[Row], file: str) -> list[str]:
    names = dict.fromkeys(row["server"] for row in rows if row["file"] == file)
    return [name for name in names if name not in (OURS, COLOCATED)]


def of_file(rows: Sequence[Row], file: str) -> str:
    """Returns the table of a file: the servers' figures, then the ratios of ours to each other one."""
    peers = peers_of(rows, file)
    mine = [name for name in (OURS, COLOCATED) if any(row["server"] == name for row in rows)]
    pairs = [(ours, peer) for peer in peers for ours in mine]
    head = ["", *(f"`{name}`" for name in mine), *peers, *(f"`{ours}` to {peer}" for ours, peer in pairs)]
    cells = []
    for name, kind in KINDS.items():
        figures = [list(rounds_of(rows, file, server, name).values()) for server in (*mine, *peers)]
        if any(figures):
            compared = (shown(ratios(rows, file, *pair, name)) for pair in pairs)
            cells.append([kind.title, *(_figure(kind, each) for each in figures), *compared])
    return table(head, cells, 1)


def _figure(kind: Kind, values: Sequence[float]) -> str:
    return f"{median(values) * kind.scale:,.{kind.num_digits}f}" if values else "-"


def shown(found: Sequence[float]) -> str:
    """Returns the median, and the range if there is one."""
    if not found:
        return "-"
    span = f" ({min(found):.2f} to {max(found):.2f})" if len(found) > 1 else ""
    return f"{median(found):.2f}{span}"
