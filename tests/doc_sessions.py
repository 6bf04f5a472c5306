"""Commands in the pages' code blocks together with what they print: a block that begins with `$ `."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^( *)```(?:console|sh)?\n(\1\$ .*?)^\1```$", re.MULTILINE | re.DOTALL)
# A command, which may be continued on further lines, and the lines up to the next one.
SESSION = re.compile(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
# Commands that print the same each time: they start and ask no server, and measure nothing.
SAME_EACH_TIME = ("simulate", "generate")
# What differs from run to run, and what stands for it.
VARYING = {
    r"\d{4}-\d\d-\d\dT[\d:.]+Z": "TIME",
    r"\b(batch|file)_\w+": r"\1_ID",
    r"…[0-9a-f]{8}\b": "…ID",
    r"/tmp/alignedserve-\w+": "DIRECTORY",
    r"[━╸]+": "BAR",
    # The width of a column.
    r"-{2,}": "--",
    r"\d[\d.,:]*": "N",
}


class Session(NamedTuple):
    page: str
    command: str
    output: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.command.replace("\\\n", " "), comments=True)


def sessions(page: Path) -> Iterator[Session]:
    for _, text in FENCE.findall(page.read_text()):
        for command, output in SESSION.findall(dedent(text)):
            yield Session(str(page.relative_to(ROOT)), command, output)


def form(text: str) -> list[str]:
    """Returns the lines without what differs from run to run: numbers, times, ids, and the widths of columns."""
    for varying, stand_in in VARYING.items():
        text = re.sub(varying, stand_in, text)
    return [" ".join(line.split()) for line in text.splitlines()]


def update(page: Path, names: Collection[str]) -> None:
    """Runs the page's commands with these names, and writes what they print into the page."""
    text = page.read_text()
    for session in sessions(page):
        if session.output.strip() and session.words[1] in names:
            command = [sys.executable, "-m", *session.words]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            text = text.replace(session.output, done.stdout)
    page.write_text(text)


# `python -m tests.doc_sessions docs/guides/simulating.md`, after a change in a policy
if __name__ == "__main__":
    for name in sys.argv[1:]:
        update(ROOT / name, SAME_EACH_TIME)
