"""Measures one system after the other. DIR/llmd_protocol.json and the page are rewritten after each."""

from __future__ import annotations

import subprocess
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from benchmarks import llmd_protocol
from benchmarks.gpu.record import Record
from benchmarks.harness import FOLDER, exit_on_sigterm, facts, parser_of, say
from benchmarks.llmd_protocol.load import CALM, Chats, ask_at, ask_at_once, bursts
from benchmarks.llmd_protocol.report import Run, page, read
from benchmarks.llmd_protocol.systems import VLLM, WINDOWS, System, opener
from benchmarks.rt_with_be.traffic import lines
from tests.clients.environments import directory_of

POLICIES = ("aligned", "fcfs", "priority")
GUIDELLM = directory_of("guidellm") / "bin/guidellm"
# The tokens of a prompt and its output. A line's prompt has at most 600.
MAX_LINE_TOKENS, MIN_LINE_TOKENS = 1400, 8
# Chats open at once while the capacity is measured.
NUM_AT_ONCE = 32
# The time until best effort has filled the server.
FILL_S = 10.0


@dataclass(frozen=True)
class Protocol:
    guidellm: Path
    phase_s: float = 90.0
    num_rounds: int = 3
    num_lines: int = 1000
    burst_share: float = 0.5
    # How long the jobs take alone, as a multiple of the length of all phases together.
    jobs_share: float = 1.0
    calibration_s: float = 30.0
    vllm: Path | None = None
    options: Sequence[str] = ()

    @property
    def bursts_s(self) -> float:
        return 2 * self.num_rounds * self.phase_s


@dataclass(frozen=True)
class Scale:
    """The load that fits this machine."""

    # Chats per second, alone.
    capacity_per_s: float
    be_tokens_per_s: float
    # Chats per second in a burst.
    rate: float
    # Output tokens per line.
    line_tokens: int


def scale_of(protocol: Protocol, capacity_per_s: float, be_tokens_per_s: float) -> Scale:
    num_lines = len(WINDOWS) * protocol.num_lines
    tokens = be_tokens_per_s * protocol.bursts_s * protocol.jobs_share / num_lines
    line_tokens = min(max(round(tokens), MIN_LINE_TOKENS), MAX_LINE_TOKENS)
    return Scale(capacity_per_s, be_tokens_per_s, protocol.burst_share * capacity_per_s, line_tokens)


def jobs_of(num_lines: int, line_tokens: int) -> dict[str, list[dict[str, Any]]]:
    """Returns different lines for each window. Their outputs have between half and one and a half times
    `line_tokens`."""
    found = {}
    for seed, window in enumerate(WINDOWS):
        bodies = list(lines(num_lines, seed).values())
        spread = range(line_tokens // 2, line_tokens + line_tokens // 2 + 1)
        found[window] = [body | {"max_tokens": spread[n % len(spread)]} for n, body in enumerate(bodies)]
    return found


# ---- measuring ------------------------------------------------------------------------------------------------------


def calibrate(protocol: Protocol) -> Scale:
    with opener(POLICIES[0], None, protocol.options)() as system:
        warm_up(protocol, system)
        capacity = ask_at_once(protocol.guidellm, system.url, NUM_AT_ONCE, protocol.calibration_s)
        # More than is answered during the measurement.
        system.start(jobs_of(1000, 200))
        time.sleep(FILL_S)
        before, begun_s = system.num_tokens(), time.monotonic()
        time.sleep(protocol.calibration_s)
        made, took_s = system.num_tokens() - before, time.monotonic() - begun_s
        system.wait(0.0)
    return scale_of(protocol, capacity.calls_per_s, made / took_s)


def measure(protocol: Protocol, name: str, scale: Scale) -> Run:
    rates = bursts(scale.rate, protocol.num_rounds)
    with opener(name, protocol.vllm, protocol.options)() as system:
        warm_up(protocol, system)
        alone = ask_at(protocol.guidellm, system.url, rates, protocol.phase_s)
        first, begun_s = system.num_tokens(), time.monotonic()
        system.start(jobs_of(protocol.num_lines, scale.line_tokens))
        time.sleep(min(FILL_S, protocol.phase_s))
        before, asked_s = system.num_tokens(), time.monotonic()
        beside = ask_at(protocol.guidellm, system.url, rates, protocol.phase_s)
        after, answered_s = system.num_tokens(), time.monotonic()
        num_left = system.num_left()
        jobs = system.wait(max(WINDOWS["30m"], 2 * protocol.bursts_s))
        last, over_s = system.num_tokens(), time.monotonic()
    of_chats = beside.num_tokens if system.counts_chats else 0
    return Run(
        name,
        alone,
        beside,
        jobs,
        num_left,
        (after - before - of_chats) / (answered_s - asked_s),
        (last - first - of_chats) / (over_s - begun_s),
    )


def warm_up(protocol: Protocol, system: System) -> Chats:
    return ask_at_once(protocol.guidellm, system.url, 4, 5.0)


def main(arguments: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    exit_on_sigterm()
    protocol = _protocol(args)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "llmd_protocol.json"
    if args.resume:
        said, runs = read(path.read_text())
        scale = Scale(**{field.name: said[field.name] for field in fields(Scale)})
    else:
        scale, runs = calibrate(protocol), []
        said = _described(protocol, scale)
    say(f"chats: {scale.rate:.2f} a second in bursts; {scale.line_tokens} tokens a line")
    record = Record(path, said, [asdict(run) for run in runs])
    measured = {run.name for run in runs}
    for name in [*args.policies, *([VLLM] if args.vllm else [])]:
        if name in measured:
            continue
        runs.append(run := measure(protocol, name, scale))
        record.add(asdict(run))
        say(f"{name}: " + ", ".join(f"{value:.2f}" for value in run.ratios))
        (args.out / "llmd_protocol.md").write_text(page(said, runs))


def _protocol(args: Namespace) -> Protocol:
    found = Protocol(
        args.guidellm.absolute(), burst_share=args.burst_share, vllm=args.vllm, options=_options(args)
    )
    if args.quick:
        return replace(found, phase_s=10.0, num_rounds=1, num_lines=40, calibration_s=8.0)
    return found


def _options(args: Namespace) -> Sequence[str]:
    return ("--colocated-instances", str(args.colocated)) if args.colocated else ()


def _described(protocol: Protocol, scale: Scale) -> dict[str, Any]:
    version = subprocess.run(
        [str(protocol.guidellm), "--version"], stdout=subprocess.PIPE, text=True, check=True
    )
    more = {
        "guidellm": version.stdout.split()[-1],
        "num_at_once": NUM_AT_ONCE,
        "burst_share": protocol.burst_share,
        "calm_rate": scale.rate / CALM,
        "phase_s": protocol.phase_s,
        "rounds": protocol.num_rounds,
        "windows": list(WINDOWS),
        "lines": protocol.num_lines,
        "jobs_share": protocol.jobs_share,
    }
    return facts() | asdict(scale) | more


def _parser() -> ArgumentParser:
    parser = parser_of(llmd_protocol.__doc__, out=FOLDER | {"required": True})
    parser.add_argument("--policies", type=lambda text: text.split(","), default=list(POLICIES))
    parser.add_argument("--vllm", type=Path, help="a Python that has vLLM for CPU: also measures it")
    parser.add_argument(
        "--guidellm", type=Path, default=GUIDELLM, help="[default: the one from `make clients`]"
    )
    parser.add_argument(
        "--burst-share",
        type=float,
        default=0.5,
        help="share of the chats per second that it can answer alone",
    )
    parser.add_argument(
        "--colocated", type=int, default=0, help="number of colocated instances, instead of 1+1"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="measure what DIR does not have yet, at the scale recorded there",
    )
    parser.add_argument("--quick", action="store_true", help="a few seconds for each, to check that it works")
    return parser


if __name__ == "__main__":
    main()
