"""An attack's arguments and its result.

An attack is any `async def attack_NAME(target)` in a module in this folder. It takes ten seconds at most on a quiet
machine. The harness watches everything else (a victim's stream, /health, memory, processes): an attack only reports
whether its own observations were right.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# The keys of a server for modules with NEEDS_KEYS = True: an attacker's and the victim's. The newcomer's is used for
# nothing else than to see whether it can learn from what the others did. The operator's can see what all have done.
KEYS = ("attacker-key-of-make-attack", "victim-key-of-make-attack")
NEWCOMER, OPERATOR = "newcomer-key-of-make-attack", "operator-key-of-make-attack"
# Connections that such a server accepts. A flood opens more of them.
MAX_CONNECTIONS = 1000


@dataclass(frozen=True)
class Target:
    url: str
    host: str
    port: int
    # The launcher's process id.
    pid: int
    state_dir: Path
    model: str
    # Factor on all time limits of the attacks. It is above 1 only while other processes use the CPUs.
    slack: float = 1.0


@dataclass(frozen=True)
class Finding:
    name: str
    held: bool
    # For humans. "killed PID" excuses the end of that process, and the silence until it has been restarted.
    detail: str
    # How many times as long another key's calls took as without the attack, measured in turn with it.
    ratio: float | None = None
