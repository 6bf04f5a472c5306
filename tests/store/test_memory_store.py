"""The store in memory and the one on Redis give the same answers to the same calls, whatever these are."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from msgspec.structs import replace

from alignedserve.store import STAGES, FileRecord, JobRecord, Lease, LineResult, Listing, StoreLimits
from alignedserve.store.redis_store import RedisStore
from alignedserve.store.scripts import PREFIX
from alignedserve.vopr.front_end.memory_store import MemoryStore
from tests.store.redis_process import redis_running

OWNERS = ("", "ann", "bob")
LIMITS = StoreLimits(
    max_bytes=2600,
    max_bytes_of_owner=1500,
    max_bytes_apart=1600,
    max_bytes_apart_of_owner=1100,
    max_open_jobs=4,
    max_open_jobs_of_owner=3,
    max_jobs_of_owner=4,
)
STATUSES = ("validating", "in_progress", "finalizing", "cancelling", "completed", "failed", "cancelled")
# A lease of LONG_S seconds does not lapse while this test runs, and one of SHORT_S has lapsed when it was given.
LONG_S, SHORT_S = 3600.0, 0.001

owners = st.sampled_from(OWNERS)
file_ids = st.sampled_from([f"file-{number}" for number in range(5)])
# two are of Anthropic's API
JOB_IDS = ("batch_0", "batch_1", "batch_2", "msgbatch_3", "batch_4", "msgbatch_5")
job_ids = st.sampled_from(JOB_IDS)
numbers = st.integers(0, 2)
lines = st.integers(1, 5)
data = st.integers(0, 700).map(lambda size: b"x" * size)
purposes = st.sampled_from(["batch", "batch_output"])
LISTS = ("files", "files:batch", "files:batch_output", "jobs", "jobs:messages")
maybe = st.booleans()


class Compared(RuleBasedStateMachine):
    runner: asyncio.Runner
    url: str

    def __init__(self) -> None:
        super().__init__()
        limits = LIMITS
        self.redis = RedisStore(self.url, limits)
        self.memory = MemoryStore(time.time, limits)
        self.leases = [Lease("batch_0", "0:nobody")]
        self.files: dict[str, FileRecord] = {}
        self.jobs: dict[str, JobRecord] = {}
        self.runner.run(self.redis._redis.flushall())

    @initialize(owners=st.lists(owners, min_size=2, max_size=3), status=st.sampled_from(STATUSES[:2]))
    def begin(self, owners: list[str], status: Any) -> None:
        """Some jobs are at work: by chance alone that takes many calls."""
        for number, owner in enumerate(owners):
            self.upload(f"file-{number}", owner, b"x" * 9)
            self.add_job(f"batch_{number}", owner, f"file-{number}", 50 - number)
        self.leases += self.ask("take", "validate", "me", LONG_S, 0, 2)
        for lease in self.leases[1:]:
            job = self.look(lease.id)
            if job and self.ask("replace_job", job, replace(job, status=status), lease):
                self.ask("begin_lines", lease, [1, 2, 3])

    def teardown(self) -> None:
        for owner in (None, *OWNERS):
            for name in LISTS:
                self.ask("page", Listing(name, owner, None, 20, "asc"))
        for job_id in JOB_IDS:
            self.look(job_id)
        self.runner.run(self.redis.close())

    def ask(self, method: str, *args: Any) -> Any:
        """Returns the answer, which is the same from both."""
        found = [self.runner.run(_outcome(store, method, args)) for store in (self.redis, self.memory)]
        assert found[0] == found[1], (method, args)
        return found[0]

    def look(self, job_id: str) -> JobRecord | None:
        for method in ("tally", "falls", "lines_done"):
            self.ask(method, job_id)
        found: JobRecord | None = self.ask("job", job_id)
        return found

    def wait_for_short_leases(self, seconds: float) -> None:
        if seconds == SHORT_S:
            time.sleep(4 * SHORT_S)

    # ---- files ----

    @rule(file_id=file_ids, owner=owners, number=numbers, data=data, is_bounded=maybe)
    def put_chunk(self, file_id: str, owner: str, number: int, data: bytes, is_bounded: bool) -> None:
        if file_id in self.files:
            owner = self.files[file_id].owner
        self.ask("put_chunk", file_id, owner, number, data, is_bounded)

    @rule(file_id=file_ids, owner=owners, num_bytes=st.integers(0, 900), is_bounded=maybe)
    def reserve(self, file_id: str, owner: str, num_bytes: int, is_bounded: bool) -> None:
        if file_id in self.files:
            owner = self.files[file_id].owner
        self.ask("reserve", file_id, owner, num_bytes, is_bounded)
        self.ask("forgotten", [file_id, "file-none", "file-1"])

    @rule(file_id=file_ids, owner=owners, num_bytes=st.integers(0, 900))
    def keep_apart(self, file_id: str, owner: str, num_bytes: int) -> None:
        self.reserve(file_id, owner, num_bytes, True)
        self.commit(file_id, owner, "batch", 1, None, num_bytes)

    @rule(
        file_id=file_ids,
        owner=owners,
        purpose=purposes,
        num_chunks=st.integers(0, 3),
        expires_at=st.none() | st.integers(1, 100),
        num_apart=st.none() | st.just(7),
    )
    def commit_file(self, file_id: str, **asked: Any) -> None:
        self.commit(file_id, **asked)

    @rule(file_id=file_ids, owner=owners, data=data)
    def upload(self, file_id: str, owner: str, data: bytes) -> None:
        self.put_chunk(file_id, owner, 0, data, True)
        self.commit(file_id, owner, "batch", 1, None)

    def commit(
        self,
        file_id: Any,
        owner: str,
        purpose: Any,
        num_chunks: int,
        expires_at: int | None,
        num_apart: int | None = None,
    ) -> None:
        # A file that is committed again is the same file.
        num_bytes, is_apart = num_apart or 1, num_apart is not None
        record = FileRecord(file_id, "in", purpose, num_bytes, num_chunks, 1, expires_at, owner, is_apart)
        record = self.files.get(file_id, record)
        if self.ask("commit_file", record) is None:
            self.files[file_id] = record

    @rule(file_id=file_ids)
    def drop_chunks(self, file_id: str) -> None:
        self.ask("drop_chunks", file_id)

    @rule(is_late=maybe)
    def drop_lapsed(self, is_late: bool) -> None:
        self.ask("drop_lapsed", time.time() + 7200 * is_late)

    @rule(file_id=file_ids, number=numbers)
    def read_file(self, file_id: str, number: int) -> None:
        self.ask("file", file_id)
        self.ask("chunk", file_id, number)
        self.ask("files", [file_id, "file-none", "file-1"])

    @rule(file_id=file_ids)
    def delete_file(self, file_id: str) -> None:
        if self.ask("delete_file", file_id) == "deleted":
            self.files.pop(file_id, None)

    @rule(now=st.integers(0, 110))
    def expired_files(self, now: int) -> None:
        self.ask("expired_files", now)

    # ---- jobs ----

    @rule(
        job_id=job_ids,
        owner=owners,
        file_id=file_ids,
        expires_at=st.integers(1, 100),
        status=st.sampled_from(STATUSES[:2]),
    )
    def add_job(
        self, job_id: Any, owner: str, file_id: Any, expires_at: int, status: Any = "validating"
    ) -> None:
        job = JobRecord(
            id=job_id,
            endpoint="/v1/completions",
            input_file_id=file_id,
            completion_window="1h",
            created_at=1,
            expires_at=expires_at,
            owner=owner,
            status=status,
        )
        self.ask("add_job", job)

    @rule(
        name=st.sampled_from(LISTS),
        owner=st.none() | owners,
        after=st.none() | file_ids | job_ids,
        limit=st.integers(1, 3),
        order=st.sampled_from(["asc", "desc"]),
    )
    def page(self, **asked: Any) -> None:
        self.ask("page", Listing(**asked))
        self.ask("jobs", JOB_IDS)

    @rule(job_id=job_ids)
    def delete_job(self, job_id: str) -> None:
        if job := self.look(job_id):
            self.ask("delete_job", job)
            self.look(job_id)

    @rule(
        job_id=job_ids,
        status=st.sampled_from(STATUSES),
        is_old=maybe,
        which=st.none() | st.integers(0, 9),
        num_files=st.integers(0, 1),
        number=numbers,
    )
    def replace_job(
        self, job_id: str, status: Any, is_old: bool, which: int | None, num_files: int, number: int
    ) -> None:
        job = self.look(job_id)
        if job is None or job.is_over:
            return
        old = replace(job, num_lines=77) if is_old else job
        new = replace(job, status=status, num_lines=job.num_lines + 1)
        lease = None if which is None else self.leases[which % len(self.leases)]
        if lease is None or lease.id != job_id or not num_files:
            self.ask("replace_job", old, new, lease)
            return
        output: Any = f"file-out-{job_id}"
        self.ask("put_chunk", output, job.owner, 0, b"out", False)
        record = FileRecord(output, "out", "batch_output", 3, 1, 1, None, job.owner)
        self.ask("replace_job", old, new, lease, [record])

    # ---- leases and results ----

    @rule(
        stage=st.sampled_from(STAGES),
        seconds=st.sampled_from([LONG_S, SHORT_S]),
        now=st.integers(0, 110),
        count=st.integers(0, 3),
    )
    def take(self, stage: str, seconds: float, now: int, count: int) -> None:
        self.leases += self.ask("take", stage, "me", seconds, now, count)
        self.wait_for_short_leases(seconds)

    @rule(which=st.integers(0, 9), stage=st.sampled_from(STAGES), begun=st.lists(lines, min_size=1))
    def lapse(self, which: int, stage: str, begun: list[int]) -> None:
        """The holder is silent for too long, and another one comes."""
        lease = self.leases[-1 - which % len(self.leases)]
        self.ask("begin_lines", lease, begun)
        self.renew(SHORT_S, len(self.leases))
        self.take(stage, LONG_S, 0, 3)

    @rule(seconds=st.sampled_from([LONG_S, SHORT_S]), num=st.integers(0, 4))
    def renew(self, seconds: float, num: int) -> None:
        self.ask("renew", self.leases[-num:] if num else [], seconds)
        self.wait_for_short_leases(seconds)

    @rule(which=st.integers(0, 9))
    def release(self, which: int) -> None:
        self.ask("release", self.leases[-1 - which % len(self.leases)])

    @rule(which=st.integers(0, 9), begun=st.lists(lines, min_size=1, max_size=3))
    def begin_lines(self, which: int, begun: list[int]) -> None:
        self.ask("begin_lines", self.leases[-1 - which % len(self.leases)], begun)

    @rule(
        which=st.integers(0, 9),
        owner=owners,
        line=lines,
        is_error=maybe,
        text=data,
        is_bounded=maybe,
        ending=st.sampled_from([None, "cancelled", "expired"]),
    )
    def put_result(
        self, which: int, owner: str, line: int, is_error: bool, text: bytes, is_bounded: bool, ending: Any
    ) -> None:
        lease = self.leases[-1 - which % len(self.leases)]
        job = self.look(lease.id)
        result = LineResult(is_error, text, 3, 2, 1, ending=ending)
        self.ask("put_result", lease, job.owner if job else owner, line, result, is_bounded)

    @rule(job_id=job_ids, asked=st.lists(st.integers(0, 6), max_size=5))
    def results(self, job_id: str, asked: list[int]) -> None:
        self.ask("results", job_id, asked)

    @rule(name=st.sampled_from(["a", "b"]), data=data)
    def state(self, name: str, data: bytes) -> None:
        self.ask("state", name)
        self.ask("put_state", name, data)

    @rule()
    def probe(self) -> None:
        self.ask("probe")
        self.ask("upgrade")

    @invariant()
    def the_same_is_counted(self) -> None:
        self.ask("count_open")
        for owner in OWNERS:
            stored = self.runner.run(self.redis._redis.get(f"{PREFIX}bytes@{owner}"))
            assert int(stored or 0) == self.memory.num_bytes(owner)
            apart = self.runner.run(self.redis._redis.get(f"{PREFIX}bytes-apart@{owner}"))
            assert int(apart or 0) == self.memory.num_bytes_apart(owner)


async def _outcome(store: Any, method: str, args: Any) -> Any:
    try:
        return await getattr(store, method)(*args)
    except Exception as error:
        return type(error), str(error)


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        running = redis_running()
        Compared.runner, Compared.url = runner, runner.run(running.__aenter__()).url
        try:
            yield runner
        finally:
            runner.run(running.__aexit__(None, None, None))


@pytest.mark.slow
@pytest.mark.parametrize("num_examples", [25])
def test_both_answer_the_same(runner: asyncio.Runner, num_examples: int) -> None:
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        Compared,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=40,
            deadline=None,
            # Shrinking takes minutes against a real server: EXPLAIN=1 does it.
            phases=list(Phase) if os.environ.get("EXPLAIN") else [Phase.reuse, Phase.generate],
            suppress_health_check=checks,
        ),
    )
