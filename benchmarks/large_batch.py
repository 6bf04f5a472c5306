"""Runs a job with OpenAI's largest allowed file on a live server, and kills processes meanwhile.

Each line asks one of several questions about a document of two kilobytes, which is as much as the demo model reads, and
carries metadata. The expected answers come from the engine alone. While the job runs, a process is killed (SIGKILL) now
and then, of each role in turn, including the store's. The next kill waits until the system has recovered. At the end
each line must have exactly one answer, the right one. The router's event logs show how many lines were run again: at
most those that were running when a gateway or the store died.

    python -m benchmarks.large_batch [--lines 50000] [--megabytes 200] [--kills 20] [--seed N] [--out DIR]
        [--serve "OPTIONS OF SERVE"]
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shlex
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from alignedserve.demo.words import any_word
from alignedserve.launch.ports import free_port
from alignedserve.protocol.messages import Submit
from alignedserve.router.eventlog import LogReader
from alignedserve.router.events import Received
from benchmarks.harness import FOLDER, facts, parser_of, progress, say, write_json
from benchmarks.rt_with_be.served import running
from benchmarks.soak.plan import Episode, Strike
from benchmarks.soak.questions import MODEL, Answer, Question, answers_to
from benchmarks.soak.striker import Striker
from benchmarks.soak.victims import memory_of

HOST = "127.0.0.1"
NUM_LINES_AT_ONCE = 64
START_S, JOB_S, LOOK_S = 240.0, 7200.0, 1.0
ENDPOINT = "/v1/chat/completions"
OVER = ("completed", "failed", "expired", "cancelled")
ROLES = ("gateway", "decode", "store", "prefill", "router", "kvpool")
INSTANCES = ("router", "kvpool-0", "gateway-0", "prefill-0", "decode-0")
NUM_DOCUMENTS, NUM_QUESTIONS, MAX_TOKENS = 8, 6, 8
# Bytes of a line without its document and metadata.
LINE_BYTES = 420
# The demo model's tokens are short: this is 1,600 of the 2,048 tokens that it can read.
MAX_DOCUMENT_BYTES = 2_000
# OpenAI allows sixteen metadata values of this length.
PIECE_CHARACTERS = 512


@dataclass
class Report:
    num_lines: int
    num_bytes: int
    status: str = ""
    seconds: float = 0.0
    kills: list[str] = field(default_factory=list)
    num_right: int = 0
    # Runs of lines beyond one each.
    num_again: int = 0
    # Upper limit of that: the most running lines, for each death of a gateway or the store.
    num_may_again: int = 0
    # Highest growth since before the upload, in MiB, of the process that grew most, by role.
    grown_mib: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


class Job:
    def __init__(
        self,
        questions: Sequence[Question],
        answers: Sequence[Answer],
        num_lines: int,
        metadata: dict[str, str],
    ) -> None:
        self._questions, self._answers, self._num_lines = questions, answers, num_lines
        self._metadata = metadata

    def lines(self) -> Iterator[bytes]:
        for number in range(self._num_lines):
            body = self._questions[number % len(self._questions)].body | {
                "user": f"reader {number}",
                "metadata": self._metadata,
            }
            line = {"custom_id": f"line-{number}", "method": "POST", "url": ENDPOINT, "body": body}
            yield json.dumps(line).encode() + b"\n"

    def objections(self, output: Path, report: Report) -> Iterator[str]:
        times: Counter[str] = Counter()
        with output.open("rb") as file:
            for text in file:
                line = json.loads(text)
                times[line["custom_id"]] += 1
                if what := self._difference(line):
                    yield f"{line['custom_id']}: {what}"
                else:
                    report.num_right += 1
        if len(times) != self._num_lines or set(times.values()) > {1}:
            several = [name for name, count in times.items() if count > 1]
            yield f"{len(times)} of {self._num_lines} lines have an answer; several have {several[:5]}"

    def _difference(self, line: dict[str, Any]) -> str:
        response = line["response"]
        if response is None or response["status_code"] != 200:
            return str(response or line["error"])[:300]
        answer = self._answers[int(line["custom_id"].split("-")[1]) % len(self._answers)]
        text = response["body"]["choices"][0]["message"]["content"]
        return "" if text == answer.text else f"{text!r}, not {answer.text!r}"


def make_questions(seed: int, num_bytes: int) -> list[Question]:
    """Makes questions about documents of `num_bytes` bytes."""
    dice = random.Random(f"documents {seed}")
    found = []
    for _ in range(NUM_DOCUMENTS):
        words = [any_word(dice)]
        while len(", ".join(words)) < num_bytes:
            words.append(any_word(dice))
        document = f"Here is a list: {', '.join(words)[:num_bytes]}."
        for _ in range(NUM_QUESTIONS):
            question = f"{document} Which word is number {dice.randint(1, len(words))}?"
            settings = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "skip_special_tokens": False}
            found.append(Question(question, settings))
    return found


def make_metadata(num_bytes: int) -> dict[str, str]:
    pieces = range(0, num_bytes, PIECE_CHARACTERS)
    return {f"source {at}": "-" * min(PIECE_CHARACTERS, num_bytes - at) for at in pieces}


class Run:
    def __init__(self, url: str, launcher: int, job: Job, report: Report) -> None:
        self._http = httpx2.AsyncClient(
            base_url=url, timeout=60.0, limits=httpx2.Limits(max_keepalive_connections=0)
        )
        self._launcher, self._job, self._report = launcher, job, report
        self._before = self._memory()
        self._striker = Striker(launcher, url, INSTANCES)

    async def run(self, num_kills: int, seed: int, output: Path) -> None:
        try:
            batch = await self._submit()
            begun_s = time.monotonic()
            striking = asyncio.create_task(
                self._strike(batch["id"], num_kills, random.Random(f"kills {seed}"))
            )
            try:
                batch = await self._until_over(batch["id"])
            finally:
                striking.cancel()
                await asyncio.gather(striking, return_exceptions=True)
            self._report.status, self._report.seconds = batch["status"], round(time.monotonic() - begun_s, 1)
            if batch["error_file_id"]:
                errors = await self._get(f"/v1/files/{batch['error_file_id']}/content")
                self._report.wrong.append(f"there is an error file: {errors.text[:300]}")
            await self._download(batch["output_file_id"], output)
        finally:
            await self._striker.close()
            await self._http.aclose()

    async def _submit(self) -> dict[str, Any]:
        with tempfile.TemporaryFile() as file:
            file.writelines(self._job.lines())
            self._report.num_bytes = file.tell()
            file.seek(0)
            form: dict[str, Any] = {"purpose": (None, b"batch"), "file": ("in.jsonl", file)}
            uploaded = (
                (await self._http.post("/v1/files", files=form, timeout=600.0)).raise_for_status().json()
            )
        asked = {"input_file_id": uploaded["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
        return (await self._http.post("/v1/batches", json=asked)).raise_for_status().json()  # type: ignore[no-any-return]

    async def _until_over(self, batch_id: str) -> dict[str, Any]:
        give_up_s = time.monotonic() + JOB_S
        with progress(self._report.num_lines, "line") as bar:
            while time.monotonic() < give_up_s:
                batch: dict[str, Any] = (await self._get(f"/v1/batches/{batch_id}")).json()
                bar.set_description(f"{batch['status']}, {len(self._report.kills)} kills")
                bar.update(batch["request_counts"]["completed"] - bar.n)
                self._note_memory()
                if batch["status"] in OVER:
                    return batch
                await asyncio.sleep(LOOK_S)
        raise RuntimeError(f"the job is not over after {JOB_S:g} s: {batch}")

    async def _strike(self, batch_id: str, num_kills: int, dice: random.Random) -> None:
        """Spreads the kills over the job's lines."""
        for number in range(num_kills):
            due = (number + dice.random()) / num_kills
            while await self._share_done(batch_id) < due:
                await asyncio.sleep(LOOK_S)
            role = ROLES[number % len(ROLES)]
            begun_s = time.monotonic()
            await self._striker.carry_out(Episode("alone", 0.0, (Strike(0.0, role, dice.randrange(16)),)))
            self._report.kills.append(f"{role} at {due:.0%}, whole after {time.monotonic() - begun_s:.1f} s")
            if role in ("gateway", "store"):
                self._report.num_may_again += NUM_LINES_AT_ONCE

    async def _share_done(self, batch_id: str) -> float:
        counts = (await self._get(f"/v1/batches/{batch_id}")).json()["request_counts"]
        return float(counts["completed"] / self._report.num_lines)

    async def _get(self, path: str) -> httpx2.Response:
        """Retries while a process is being replaced."""
        while True:
            with contextlib.suppress(httpx2.TransportError):
                found = await self._http.get(path)
                if found.status_code < 500:
                    return found.raise_for_status()
            await asyncio.sleep(LOOK_S / 4)

    async def _download(self, file_id: str, output: Path) -> None:
        async with self._http.stream("GET", f"/v1/files/{file_id}/content") as response:
            with output.open("wb") as file:
                async for piece in response.aiter_bytes():
                    file.write(piece)

    def _memory(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for each in memory_of(self._launcher):
            found[each.role] = max(found.get(each.role, 0), each.num_bytes)
        return found

    def _note_memory(self) -> None:
        for role, num_bytes in self._memory().items():
            grown = round((num_bytes - self._before.get(role, 0)) / 2**20, 1)
            self._report.grown_mib[role] = max(grown, self._report.grown_mib.get(role, 0.0))


def num_runs(event_logs: Path) -> int:
    """Returns the number of started lines, over all routers. A gateway gives each run of a line its own key."""
    keys = set()
    for path in event_logs.iterdir():
        for step in LogReader(path).steps():
            if isinstance(step.event, Received) and isinstance(step.event.message, Submit):
                keys.add(step.event.message.request.key)
    return len(keys)


def carry_out(args: Namespace) -> Report:
    report = Report(args.lines, 0)
    num_bytes = round(args.megabytes * 1e6 / args.lines) - LINE_BYTES
    questions = make_questions(args.seed, min(num_bytes, MAX_DOCUMENT_BYTES))
    job = Job(questions, answers_to(questions), args.lines, make_metadata(num_bytes - MAX_DOCUMENT_BYTES))
    port = free_port(HOST)
    # A socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="large-", dir="/tmp", ignore_cleanup_errors=True) as name:
        events = Path(name) / "events"
        own = ["--host", HOST, "--port", str(port), "--shutdown-timeout", "5", "--log-level", "warning"]
        own += [
            "--state-dir",
            f"{name}/state",
            "--cost-profile",
            f"{name}/profile",
            "--event-log",
            str(events),
        ]
        command = [sys.executable, "-m", "alignedserve", "serve", "--served-model-name", MODEL, *own]
        command += ["--dtype", "float32", "--batch-max-num-lines", str(NUM_LINES_AT_ONCE)]
        command += shlex.split(args.serve)
        with running(command, Path(name) / "log", "ready after", START_S) as process:
            run = Run(f"http://{HOST}:{port}", process.pid, job, report)
            asyncio.run(run.run(args.kills, args.seed, Path(name) / "output"))
        report.wrong += list(job.objections(Path(name) / "output", report))[:20]
        report.num_again = num_runs(events) - report.num_lines
    if report.status != "completed":
        report.wrong.append(f"the job is {report.status}")
    if report.num_again > report.num_may_again:
        report.wrong.append(f"{report.num_again} lines ran again, more than {report.num_may_again}")
    return report


def main() -> None:
    parser = parser_of(__doc__, out=FOLDER | {"default": Path()})
    parser.add_argument("--lines", type=int, default=50_000)
    parser.add_argument("--megabytes", type=float, default=200.0)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", default="", metavar="OPTIONS", help="options of `alignedserve serve`")
    args = parser.parse_args()
    report = carry_out(args)
    write_json(args.out / "large_batch.json", facts() | asdict(report))
    say(
        f"{report.status} in {report.seconds:.0f} s, {len(report.kills)} kills: {report.num_right} of "
        f"{report.num_lines} lines right, {report.num_again} ran again (at most {report.num_may_again}); "
        f"grown by MiB: {report.grown_mib}"
    )
    for what in report.wrong:
        say(f"wrong: {what}")
    sys.exit(1 if report.wrong else 0)


if __name__ == "__main__":
    main()
