"""What an attack is given, and what it says. One is any `async def attack_NAME(target)` in a module of this folder; it
takes ten seconds at most.

What goes on beside it (a victim's stream, /health, memory, processes) is watched by the harness: an attack says only
whether what it saw itself was right.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# Those of the server of a module that has NEEDS_KEYS = True: an attacker's, and the victim's.
KEYS = ("attacker-key-of-make-attack", "victim-key-of-make-attack")


@dataclass(frozen=True)
class Target:
    url: str
    host: str
    port: int
    # of the launcher
    pid: int
    state_dir: Path
    model: str


@dataclass(frozen=True)
class Finding:
    name: str
    held: bool
    # for people; "killed PID" excuses that process's death, and the silence until it is back
    detail: str
