"""Starts a server and runs all attacks in this folder against it while it keeps serving a victim.

    python -m benchmarks.attack [--only NAME | --draw NUMBER] [--minutes M] [--json FILE]

For each attack it prints the longest time without a token for the victim and the slowest answer of /health, each beside
the same for some seconds before all attacks. The seconds after each attack are judged too. It also prints how much the
memory of all processes grew at most, and after three seconds, and what the attack itself observed. Exits with 1 if
anything is BROKEN.

`--draw` runs attacks that the number draws, as many as begin within the minutes. They are judged by counts and
statuses. Their times are printed, but no machine is too slow for them.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx2

from alignedserve.launch.ports import free_port
from benchmarks.attack.attacks import Attack, all_attacks, drawn
from benchmarks.attack.processes import MemoryWatch, is_alive, num_bytes
from benchmarks.attack.target import KEYS, MAX_CONNECTIONS, NEWCOMER, OPERATOR, Finding, Target
from benchmarks.attack.verdict import HEAD, Measured, Watched, objections, row
from benchmarks.attack.victim import Watch
from benchmarks.harness import facts, parser_of, progress, say, write_json
from benchmarks.rt_with_be.served import running

HOST = "127.0.0.1"
# On servers with keys. Some attacks want others' KV to be evicted.
SMALL_POOL = ("--pool-memory-bytes", str(128 << 20), "--kv-cache-memory-bytes", str(128 << 20))
START_S = 180.0
BASELINE_S, AFTER_S = 3.0, 3.0
# The longest time an attack may take before it is stopped, and then until nothing of it is left on the server.
MAX_ATTACK_S, SETTLE_S = 30.0, 20.0
ATTACKER_NICENESS = 5
# CPU seconds of the work that shows how busy the machine is, and the most that limits grow.
YARDSTICK_S, MAX_SLACK = 0.1, 10.0
# A silence of this many seconds is a hang on any machine.
HANG_S = 20.0


@dataclass
class Session:
    """A server under attack, and the processes that watch it."""

    target: Target
    key: str | None
    watch: Watch

    def baseline(self) -> Watched:
        self.watch.begin()
        time.sleep(BASELINE_S)
        return self.watch.end()

    def measure(self, attack: Attack) -> tuple[Finding, Measured]:
        pids = self._pids()
        self.watch.begin()
        with MemoryWatch(self.target.pid) as memory:
            finding, slack = _from_elsewhere(attack, self.target)
            time.sleep(AFTER_S)
            kept = num_bytes(self.target.pid)
        watched = self.watch.end()
        measured = Measured(
            watched,
            grown_bytes=memory.most - memory.before,
            kept_bytes=kept - memory.before,
            died={name: pid for name, pid in pids.items() if not is_alive(pid)},
            is_up=is_alive(self.target.pid),
            last_status=self._status(),
            is_settled=self._settle(),
            slack=slack,
        )
        return finding, measured

    def _get(self, path: str) -> httpx2.Response | None:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            return httpx2.get(self.target.url + path, headers=headers, timeout=10 * self.target.slack)
        except httpx2.HTTPError:
            return None

    def _status(self) -> int:
        response = self._get("/health")
        return response.status_code if response else 0

    def _pids(self) -> dict[str, int]:
        response = self._get("/v1/cluster")
        processes = response.json().get("processes", []) if response else []
        return {each["instance_id"]: each["pid"] for each in processes if each["state"] == "up"}

    def _settle(self) -> bool:
        """Returns once the server only has the victim's requests, or has had time for that."""
        deadline = time.monotonic() + SETTLE_S * self.target.slack
        while time.monotonic() < deadline and is_alive(self.target.pid):
            response = self._get("/v1/cluster")
            if response and sum(response.json().get("requests", {"?": 2}).values()) <= 1:
                return True
            time.sleep(0.2)
        return False


def _from_elsewhere(attack: Attack, target: Target) -> tuple[Finding, float]:
    """Returns the finding, and the slack of the machine. A real attacker has its own machine. Here only its thread gets
    a lower priority."""

    def carry_out() -> tuple[Finding, float]:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), ATTACKER_NICENESS)
        slack = _slack()
        finding = asyncio.run(_carry_out(attack, replace(target, slack=max(target.slack, slack))))
        return finding, max(slack, _slack())

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(carry_out).result()


def _slack() -> float:
    """Returns how many times as long as on a quiet machine this thread's work takes now."""
    begun_s, end_s = time.perf_counter(), time.thread_time() + YARDSTICK_S
    while time.thread_time() < end_s:
        pass
    return min(max(1.0, (time.perf_counter() - begun_s) / YARDSTICK_S), MAX_SLACK)


async def _carry_out(attack: Attack, target: Target) -> Finding:
    limit_s = MAX_ATTACK_S * target.slack
    try:
        async with asyncio.timeout(limit_s):
            return replace(await attack.run(target), name=attack.name)
    except TimeoutError:
        return Finding(attack.name, False, f"it went on for {limit_s:g} s")
    except Exception as error:
        return Finding(attack.name, False, f"it raised {type(error).__name__}: {error}")


@contextmanager
def session(has_keys: bool, slack: float) -> Iterator[Session]:
    # The path of a socket must be short.
    with tempfile.TemporaryDirectory(prefix="attack-", dir="/tmp", ignore_cleanup_errors=True) as name:
        state, port = Path(name), free_port(HOST)
        options = ["--host", HOST, "--port", str(port), "--state-dir", str(state), "--shutdown-timeout", "1"]
        if has_keys:
            (state / "keys").write_text("".join(f"{key}\n" for key in (*KEYS, NEWCOMER)))
            options += ["--api-key-file", str(state / "keys"), "--operator-key", OPERATOR, *SMALL_POOL]
            options += ["--max-connections", str(MAX_CONNECTIONS)]
        command = [sys.executable, "-m", "alignedserve", "serve", "--dtype", "float32", *options]
        with running(command, state / "log", "ready after", START_S) as process:
            url = f"http://{HOST}:{port}"
            watch = Watch(url, KEYS[1] if has_keys else None)
            key = OPERATOR if has_keys else None
            try:
                yield Session(Target(url, HOST, port, process.pid, state, "demo", slack), key, watch)
            finally:
                watch.close()


def attack_all(
    attacks: Sequence[Attack], hang_s: float | None = None, slack: float = 1.0, end_s: float = math.inf
) -> tuple[list[dict[str, Any]], bool]:
    """Returns the findings and whether anything is broken. `slack` is for the attacks' own bounds (`Target`), at least.
    `hang_s`: see `objections`. No attack begins after `end_s`, of `time.monotonic`, other than the first."""
    rows: list[dict[str, Any]] = []

    def is_over() -> bool:
        return bool(rows) and time.monotonic() > end_s

    with progress(len(attacks), "attack") as bar:
        for has_keys, some in itertools.groupby(attacks, key=lambda each: each.needs_keys):
            if is_over():
                break
            bar.set_description("starting a server")
            with session(has_keys, slack) as at:
                before = at.baseline()
                say(
                    f"{HEAD}\nwith{'' if has_keys else 'out'} keys: {before.num_tokens / BASELINE_S:.0f} tokens/s"
                )
                for attack in some:
                    if is_over():
                        break
                    bar.set_description(attack.name)
                    found = at.measure(attack)
                    bar.update()
                    if not found[1].is_up:
                        rows.append(_as_json(*found, before, hang_s))
                        break
                    finding, measured = found[0], replace(found[1], after=at.baseline())
                    say(row(finding, measured, before, hang_s))
                    rows.append(_as_json(finding, measured, before, hang_s))
    return rows, any(each["objections"] for each in rows)


def _as_json(finding: Finding, measured: Measured, baseline: Watched, hang_s: float | None) -> dict[str, Any]:
    return {
        "finding": asdict(finding),
        "objections": objections(finding, measured, baseline, hang_s),
        "measured": asdict(measured),
        "baseline": asdict(baseline),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--only", default="", help="only attacks with this text in their names (MODULE.ATTACK)"
    )
    parser.add_argument("--draw", type=int, metavar="NUMBER", help="run attacks that this number draws")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no attack after this time")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    attacks = all_attacks(options.only) if options.draw is None else drawn(options.draw)
    if not attacks:
        parser.error(
            f"no attack is called {options.only!r}: {', '.join(each.name for each in all_attacks())}"
        )
    begun_s = time.monotonic()
    hang_s = None if options.draw is None else HANG_S
    rows, broken = attack_all(attacks, hang_s, end_s=begun_s + 60 * options.minutes)
    num_broken = sum(bool(each["objections"]) for each in rows)
    print(f"{len(rows)} attacks in {time.monotonic() - begun_s:.0f} s: {num_broken} BROKEN, the others held")
    write_json(options.json, facts() | {"attacks": rows})
    is_cut = len(rows) < len(attacks) and options.minutes == math.inf
    sys.exit(1 if broken or is_cut else 0)


if __name__ == "__main__":
    main()
