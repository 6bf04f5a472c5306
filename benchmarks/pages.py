"""Publishes a benchmark's results: a page for readers, and all figures as JSON."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.cpu_vs_vllm import cpu_name
from benchmarks.progress import say


def command_of(module: str) -> str:
    """Returns the command line of this process. `module` is its name in `benchmarks`."""
    return shlex.join(["python", "-m", f"benchmarks.{module}", *sys.argv[1:]])


def publish(text: str, command: str, figures: Mapping[str, Sequence[Any]], out: Path | None) -> None:
    """Prints the page and writes it to `out`.md. Writes the figures, which are dataclasses, to `out`.json."""
    say(text)
    if out is None:
        return
    head = {
        "command": command,
        "time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": cpu_name(),
    }
    lists = {name: [asdict(each) for each in found] for name, found in figures.items()}
    out.with_suffix(".md").write_text(text)
    out.with_suffix(".json").write_text(json.dumps(head | lists, indent=1) + "\n")
