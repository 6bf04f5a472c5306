"""The store against a real Redis: what is confirmed is kept, and partial writes are nowhere."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from alignedserve.store import (
    FileId,
    FileRecord,
    JobId,
    JobRecord,
    Lease,
    LeaseLost,
    LineResult,
    Listing,
    Stage,
    StoreAway,
    StoreFull,
    StoreLimits,
    Tally,
    TooManyJobs,
)
from alignedserve.store.base import PLACE_KEPT_S, UNCOMMITTED_S, Page
from alignedserve.store.records import MESSAGE_BATCH, Order, new_file_id, new_job_id
from alignedserve.store.redis_store import RedisStore
from alignedserve.store.scripts import PREFIX
from alignedserve.store.server import PrivateServer, find_server, locked
from tests.store.redis_process import RedisProcess, play

# what is left when everything is gone
NOTHING = {"sequence", "bytes", "bytes@"}


async def a_file(store: RedisStore, *chunks: bytes, name: str = "in.jsonl", owner: str = "") -> FileRecord:
    file = FileRecord(new_file_id(), name, "batch", sum(map(len, chunks)), len(chunks), 100, owner=owner)
    for number, chunk in enumerate(chunks):
        await store.put_chunk(file.id, owner, number, chunk)
    await store.commit_file(file)
    return file


async def a_job(store: RedisStore, file: FileRecord | None = None, expires_at: int = 3601) -> JobRecord:
    file = file or await a_file(store, b"x")
    job = JobRecord(
        id=new_job_id(),
        endpoint="/v1/completions",
        input_file_id=file.id,
        completion_window="1h",
        created_at=1,
        expires_at=expires_at,
        owner=file.owner,
    )
    assert await store.add_job(job)
    return job


async def taken(
    store: RedisStore, holder: str, seconds: float, stage: Stage = "validate", now: float = 0
) -> Lease | None:
    leases = await store.take(stage, holder, seconds, now, 1)
    return leases[0] if leases else None


async def keys_of(store: RedisStore) -> set[str]:
    found = await store._redis.keys(PREFIX + "*")
    return {key.decode().removeprefix(PREFIX) for key in found}


async def stored_bytes(store: RedisStore, owner: str | None = None) -> int:
    name = "bytes" if owner is None else f"bytes@{owner}"
    return int(await store._redis.get(PREFIX + name) or 0)


def test_a_file_is_there_once_it_is_committed_and_gone_once_it_is_deleted() -> None:
    async def scenario(redis: RedisProcess, store: RedisStore) -> None:
        file_id = new_file_id()
        await store.put_chunk(file_id, "", 0, b"ab")
        await store.put_chunk(file_id, "", 1, b"c")
        assert await store.file(file_id) is None
        file = FileRecord(file_id, "in.jsonl", "batch", 3, 2, 100)
        await store.commit_file(file)
        assert await store.file(file_id) == file
        assert [await store.chunk(file_id, number) for number in range(3)] == [b"ab", b"c", None]
        assert await store.delete_file(file_id) == "deleted"
        assert await store.delete_file(file_id) == "absent"
        assert await keys_of(store) == NOTHING and await stored_bytes(store) == 0

    play(scenario)


def test_what_may_have_happened_may_be_tried_again_and_given_up() -> None:
    async def scenario(redis: RedisProcess, store: RedisStore) -> None:
        # the answer to a commit was lost, say: whoever uploads gives up, and the file is there
        file = await a_file(store, b"ab")
        await store.drop_chunks(file.id)
        assert await store.chunk(file.id, 0) == b"ab"
        # the answer to a new job was lost, and meanwhile somebody has begun it
        job = await a_job(store, file)
        lease = await taken(store, "one", 10)
        assert lease
        begun = replace(job, status="in_progress")
        assert await store.replace_job(job, begun, lease)
        assert await store.add_job(job)
        assert await store.job(job.id) == begun

    play(scenario)


def test_a_server_that_takes_no_writes_is_away() -> None:
    async def scenario(redis: RedisProcess, store: RedisStore) -> None:
        file = await a_file(store, b"ab")
        # a replica that there is not; a full disk answers in the same way
        await store._redis.config_set("min-replicas-to-write", 1)
        with pytest.raises(StoreAway, match="NOREPLICAS"):
            await store.put_chunk(new_file_id(), "", 0, b"x")
        with pytest.raises(StoreAway, match="NOREPLICAS"):
            await store.delete_file(file.id)
        await store._redis.config_set("min-replicas-to-write", 0)
        assert await store.delete_file(file.id) == "deleted"

    play(scenario)


def test_chunks_of_a_file_that_is_never_committed_lapse() -> None:
    async def scenario(redis: RedisProcess, store: RedisStore) -> None:
        file_id = new_file_id()
        await store.put_chunk(file_id, "", 0, b"ab")
        with pytest.raises(ValueError, match="not all of its 2 chunks"):
            await store.commit_file(FileRecord(file_id, "in.jsonl", "batch", 3, 2, 100))
        assert await store.file(file_id) is None
        await store.drop_lapsed(time.time() + UNCOMMITTED_S - 60)
        assert await store.chunk(file_id, 0) == b"ab" and await stored_bytes(store) == 2
        await store.drop_lapsed(time.time() + UNCOMMITTED_S)
        assert await keys_of(store) == NOTHING - {"sequence"} and await stored_bytes(store) == 0

    play(scenario)


def test_listings_have_pages_in_both_directions() -> None:
    async def scenario(redis: RedisProcess, store: RedisStore) -> None:
        ids = [(await a_file(store, b"x", name=str(number))).id for number in range(5)]

        async def pages(order: str, limit: int) -> list[list[str]]:
            found, after = [], None
            while True:
                page = await store.page(Listing("files:batch", "", after, limit, order))  # type: ignore[arg-type]
                assert page
                found.append(page.ids)
                if not page.has_more:
                    return found
                after = FileId(page.ids[-1])

        assert await pages("asc", 2) == [ids[:2], ids[2:4], ids[4:]]
        assert await pages("desc", 3) == [ids[:1:-1], ids[1::-1]]
        assert await pages("asc", 5) == [ids]
        assert await store.page(Listing("files:batch", "", "file-none", 5, "asc")) is None
        nothing = await store.page(Listing("files:batch_output", "", None, 5, "asc"))
        assert nothing and not nothing.ids and not nothing.has_more

    play(scenario)


def test_a_file_that_a_job_reads_can_not_be_deleted() -> None:
    async def scenario(redis: RedisProcess, store: RedisStore) -> None:
        file = await a_file(store, b"x")
        job = await a_job(store, file)
        assert await store.delete_file(file.id) == "in_use"
        assert await store.replace_job(job, replace(job, status="failed"), None)
        assert await store.delete_file(file.id) == "deleted"
        assert not await store.add_job(replace(job, id=new_job_id()))

    play(scenario)


def test_files_that_expire_are_named_when_they_have() -> None:
    async def scenario(redis: RedisProcess, store: RedisStore) -> None:
        file = replace(await a_file(store, b"x"), expires_at=5000)
        await store.commit_file(file)
        assert await store.expired_files(4999) == []
        assert await store.expired_files(5000) == [file.id]
        await store.delete_file(file.id)
        assert await store.expired_files(5000) == []

    play(scenario)


def test_a_job_is_replaced_only_as_it_was_read() -> None:
    async def scenario(redis: RedisProcess, store: RedisStore) -> None:
        job = await a_job(store)
        cancelling = replace(job, status="cancelling")
        assert await store.replace_job(job, cancelling, None)
        assert not await store.replace_job(job, replace(job, status="in_progress"), None)
        assert await store.job(job.id) == cancelling
        assert await store.count_open() == {"cancelling": 1}

    play(scenario)


def test_the_most_urgent_job_is_the_first() -> None:
    async def scenario(redis: RedisProcess, store: RedisStore) -> None:
        jobs = [await a_job(store, expires_at=expires_at) for expires_at in (300, 100, 200)]
        leases = await store.take("validate", "a", 60, 0, 2)
        leases += await store.take("validate", "b", 60, 0, 2)
        assert [lease.id for lease in leases] == [jobs[1].id, jobs[2].id, jobs[0].id]
        page = await store.page(Listing("jobs", "", None, 2))
        assert page and page.ids == [jobs[2].id, jobs[1].id] and page.has_more

    play(scenario)


def test_a_lease_has_one_holder_and_lapses() -> None:
    async def scenario(redis: RedisProcess, store: RedisStore) -> None:
        job = await a_job(store)
        first = await taken(store, "a", 60)
        assert first and await taken(store, "b", 60) is None
        assert await store.renew([first], 60) == ["held"]
        await store.release(first)
        second = await taken(store, "b", 0.05)
        assert second and second.token != first.token
        while not (third := await taken(store, "c", 60)):
            await asyncio.sleep(0.01)
        assert await store.renew([second, third], 60) == ["lost", "held"]
        # nothing happens to the one who has it now
        await store.release(second)
        assert await store.renew([third], 60) == ["held"]
        assert await store.replace_job(job, replace(job, status="cancelling"), None)
        assert await store.renew([third], 60) == ["cancelling"]

    play(scenario)


def test_who_is_slow_keeps_a_lease_that_nobody_else_has_taken() -> None:
    async def scenario(redis: RedisProcess, store: RedisStore) -> None:
        job = await a_job(store)
        lease = await taken(store, "a", 0.01)
        assert lease
        while await store._redis.exists(f"{PREFIX}lease:{job.id}"):
            await asyncio.sleep(0.01)
        await store.put_result(lease, "", 1, LineResult(False, b"{}"))
        assert await store.renew([lease], 60) == ["held"] and await taken(store, "b", 60) is None

    play(scenario)


def test_a_line_that_was_under_way_when_its_holder_fell_is_counted() -> None:
    async def scenario(redis: RedisProcess, store: RedisStore) -> None:
        job = await a_job(store)
        for count in (1, 2):
            lease = await taken(store, "a", 0.01)
            assert lease
            await store.begin_lines(lease, [3, 4, 5])
            await store.put_result(lease, "", 4, LineResult(False, b"{}"))
            while not (second := await taken(store, "b", 60)):
                await asyncio.sleep(0.01)
            assert await store.falls(job.id) == {3: count, 5: count}
            with pytest.raises(LeaseLost):
                await store.begin_lines(lease, [3])
            # what is stopped in good order has not fallen
            await store.begin_lines(second, [9])
            await store.release(second)
        assert 9 not in await store.falls(job.id)

    play(scenario)


def test_a_holder_who_has_lost_the_lease_writes_nothing() -> None:
    async def scenario(redis: RedisProcess, store: RedisStore) -> None:
        job = await a_job(store)
        lost = await taken(store, "a", 60)
        assert lost
        await store.release(lost)
        for _ in ("nobody's", "somebody else's"):
            with pytest.raises(LeaseLost):
                await store.put_result(lost, "", 1, LineResult(False, b"{}"))
            with pytest.raises(LeaseLost):
                await store.replace_job(job, replace(job, status="completed"), lost, [])
            await taken(store, "b", 60)
        assert await store.lines_done(job.id) == set() and await store.job(job.id) == job

    play(scenario)


def test_the_first_result_of_a_line_counts() -> None:
    async def scenario(redis: RedisProcess, store: RedisStore) -> None:
        job = await a_job(store)
        lease = await taken(store, "a", 60)
        assert lease
        await store.put_result(lease, "", 7, LineResult(False, b"one", 3, 4, 2))
        await store.put_result(lease, "", 7, LineResult(True, b"two", 30, 40, 20))
        await store.put_result(lease, "", 9, LineResult(True, b"three"))
        assert await store.lines_done(job.id) == {7, 9}
        found = await store.results(job.id, [7, 8, 9])
        assert [each and each.text for each in found] == [b"one", None, b"three"]
        tally = await store.tally(job.id)
        assert replace(tally, num_result_bytes=0) == Tally(1, 1, 3, 4, 2)
        # what a later version counts besides
        await store._redis.hset(f"alignedserve:tally:{job.id}", "num_thoughts", "3")
        assert await store.tally(job.id) == tally

    play(scenario)


def test_a_job_ends_and_its_files_appear_in_one_step() -> None:
    async def scenario(redis: RedisProcess, store: RedisStore) -> None:
        job = await a_job(store)
        lease = await taken(store, "a", 60)
        assert lease
        await store.put_result(lease, "", 1, LineResult(False, b"one"))
        files = [FileRecord(new_file_id(), name, "batch_output", 1, 1, 5) for name in ("out", "errors")]
        for file in files:
            await store.put_chunk(file.id, "", 0, b"x")
        over = replace(job, status="completed", output_file_id=files[0].id)
        assert await store.replace_job(job, over, lease, files)
        page = await store.page(Listing("files:batch_output", "", None, 9, "asc"))
        assert page and page.ids == [file.id for file in files]
        assert await store.count_open() == {} and await store.job(job.id) == over
        left = await keys_of(store)
        gone = ("lease", "holder", "running", "falls", "results", "uses", "open", "upload")
        assert not {key for key in left if key.startswith(gone)}
        # the answer may have been lost, and it is asked again
        with pytest.raises(LeaseLost):
            await store.replace_job(job, over, lease, files)

    play(scenario)


@pytest.mark.slow
def test_what_was_answered_survives_a_kill() -> None:
    async def scenario(redis: RedisProcess, store: RedisStore) -> None:
        job = await a_job(store)
        lease = await taken(store, "a", 60)
        assert lease

        async def write(line: int) -> int:
            await store.put_result(lease, "", line, LineResult(False, b"x" * 2000))
            return line

        # on a busy machine, it may be too late for all of the others
        answered = {await write(1)}
        writing = [asyncio.create_task(write(line)) for line in range(2, 2000)]
        await asyncio.wait(writing, return_when=asyncio.FIRST_COMPLETED)
        await redis.kill()
        ended = await asyncio.gather(*writing, return_exceptions=True)
        answered |= {each for each in ended if isinstance(each, int)}
        assert {type(each) for each in ended} <= {int, StoreAway}
        with pytest.raises(StoreAway):
            await store.job(job.id)
        await redis.start()
        # through the same connections
        done = await store.lines_done(job.id)
        assert answered <= set(done)
        assert (await store.tally(job.id)).num_completed == len(done)
        assert await store.renew([lease], 60) == ["held"]

    play(scenario)


def test_whoever_is_cancelled_hears_of_it_at_once() -> None:
    async def scenario(redis: RedisProcess, store: RedisStore) -> None:
        for num_steps in range(12):
            asking = asyncio.create_task(store.falls(new_job_id()))
            for _ in range(num_steps):
                await asyncio.sleep(0)
            if asking.cancel():
                with pytest.raises(asyncio.CancelledError):
                    await asking
            # and what comes after gets its own answer
            assert await store.expired_files(0) == []

    play(scenario)


def test_a_directory_has_one_system(tmp_path: Path) -> None:
    with (
        locked(tmp_path / "state"),
        pytest.raises(ValueError, match="state_dir='.*state': in use by another server; .* --state-dir"),
        locked(tmp_path / "state"),
    ):
        pass
    (tmp_path / "file").touch()
    with (
        pytest.raises(ValueError, match="^state_dir='.*file': is a file; give a directory$"),
        locked(tmp_path / "file"),
    ):
        pass
    with locked(tmp_path / "state"):
        assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700


def test_a_server_that_lives_on_keeps_the_directory() -> None:
    async def scenario(tmp_path: Path) -> None:
        with locked(tmp_path) as lock:
            redis = RedisProcess(PrivateServer(find_server(), tmp_path, lock))
            await redis.start()
        with pytest.raises(ValueError, match="in use by another server"), locked(tmp_path):
            pass
        await redis.kill()
        with locked(tmp_path):
            pass

    with tempfile.TemporaryDirectory(prefix="redis-", dir="/tmp") as directory:
        asyncio.run(scenario(Path(directory)))


def test_a_state_is_kept_and_replaced() -> None:
    async def scenario(redis: RedisProcess, store: RedisStore) -> None:
        assert await store.state("x") is None
        await store.put_state("x", b"one")
        await store.put_state("x", b"\x00two")
        await redis.kill()
        await redis.start()
        assert await store.state("x") == b"\x00two"

    play(scenario)


def test_it_listens_on_its_socket_and_nowhere_else() -> None:
    async def scenario(redis: RedisProcess, store: RedisStore) -> None:
        config = await store._redis.config_get("*")
        assert config["port"] == "0" and config["appendfsync"] == "always"
        assert redis.server.socket.stat().st_mode & 0o777 == 0o600

    play(scenario)


@pytest.mark.parametrize("url", ["nonsense", "http://host", "redis://host:port"])
def test_an_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError):
        RedisStore(url)


def test_a_name_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="its name is too long by [0-9]+ bytes"):
        PrivateServer("redis-server", tmp_path / ("x" * 120), 0)


# ---- whose it is, and how much there may be ----


def test_an_owner_has_listings_of_his_own() -> None:
    async def scenario(redis: RedisProcess, store: RedisStore) -> None:
        files = [await a_file(store, b"x", owner=owner) for owner in ("a", "b", "a")]
        jobs = [await a_job(store, file) for file in files]
        for owner, places in (("a", [0, 2]), ("b", [1]), (None, [0, 1, 2]), ("", [])):
            found = await store.page(Listing("files:batch", owner, None, 9, "asc"))
            assert found and found.ids == [files[place].id for place in places]
            found = await store.page(Listing("jobs", owner, None, 9))
            assert found and found.ids == [jobs[place].id for place in reversed(places)]
        # another one's is no place to go on from
        assert await store.page(Listing("files", "a", files[1].id, 9, "asc")) is None
        await store.delete_file(files[1].id)
        assert await store.delete_file(files[1].id) == "in_use"

    play(scenario)


def test_what_is_stored_is_counted_and_bounded_wherever_it_is() -> None:
    async def scenario(redis: RedisProcess, store: RedisStore) -> None:
        file_id = new_file_id()
        await store.put_chunk(file_id, "a", 0, b"x" * 3000)
        # the answer was lost, say
        await store.put_chunk(file_id, "a", 0, b"x" * 3000)
        assert await stored_bytes(store) == await stored_bytes(store, "a") == 3000
        with pytest.raises(StoreFull, match="yours may have 4000 bytes"):
            await store.put_chunk(file_id, "a", 1, b"x" * 1001)
        other = await a_file(store, b"x" * 2000, owner="b")
        with pytest.raises(StoreFull, match="all together may have 6000 bytes"):
            await store.put_chunk(new_file_id(), "b", 0, b"x" * 1000)
        # whoever gives up makes room
        await store.drop_chunks(file_id)
        assert await stored_bytes(store, "a") == 0
        job = await a_job(store, other)
        lease = await taken(store, "g", 60)
        assert lease
        with pytest.raises(StoreFull):
            await store.put_result(lease, "b", 1, LineResult(False, b"x" * 2000))
        await store.put_result(lease, "b", 1, LineResult(False, b"x" * 2000), False)
        over = replace(job, status="completed")
        assert await store.replace_job(job, over, lease, [])
        # all but the job's record
        await store.delete_file(other.id)
        size = int(await store._redis.strlen(f"{PREFIX}job:{job.id}"))
        assert await stored_bytes(store) == await stored_bytes(store, "b") == size > 0

    play(scenario, StoreLimits(6000, 4000))


def test_so_many_jobs_are_open_and_so_many_kept() -> None:
    async def scenario(redis: RedisProcess, store: RedisStore) -> None:
        mine, other = [await a_file(store, b"x", owner=owner) for owner in ("a", "b")]
        jobs = [await a_job(store, mine) for _ in range(2)]
        with pytest.raises(TooManyJobs, match="you have 2 open batches"):
            await a_job(store, mine)
        # asked once more, since the answer was lost: it is there
        assert await store.add_job(jobs[0])
        await a_job(store, other)
        with pytest.raises(TooManyJobs, match="there are 3 open batches"):
            await a_job(store, other)
        for _ in range(3):
            assert await store.replace_job(jobs[0], replace(jobs[0], status="cancelled"), None)
            jobs = [*jobs[1:], await a_job(store, mine)]
        # the oldest that are over are forgotten, and nothing else
        page = await store.page(Listing("jobs", "a", None, 9))
        assert page and len(page.ids) == 3 and {job.id for job in jobs} < set(page.ids)
        kept = [key for key in await keys_of(store) if key.startswith("job:")]
        assert len(kept) == 4

    play(scenario, StoreLimits(None, None, 3, 2, max_jobs_of_owner=3))


def test_a_job_that_is_over_is_deleted_from_all_listings() -> None:
    async def scenario(redis: RedisProcess, store: RedisStore) -> None:
        file = await a_file(store, b"x", owner="a")
        empty = await keys_of(store), await stored_bytes(store)
        plain = await a_job(store, file)
        job = replace(plain, id=new_job_id(MESSAGE_BATCH), status="in_progress")
        assert await store.add_job(job)
        for name, ids in (("jobs", [job.id, plain.id]), ("jobs:messages", [job.id])):
            for owner in ("a", None):
                for order in ("asc", "desc"):
                    page = await store.page(Listing(name, owner, None, 9, order))
                    assert page and page.ids == (ids if order == "desc" else ids[::-1])
        # It was validated before it was added.
        (lease,) = await store.take("run", "a", 60, 0, 9)
        assert lease.id == job.id
        for line, ending in enumerate(("cancelled", "cancelled", "expired", None), 1):
            result = LineResult(True, b"{}", ending=ending)  # type: ignore[arg-type]
            await store.put_result(lease, "a", line, result)
        tally = await store.tally(job.id)
        assert (tally.num_failed, tally.num_cancelled, tally.num_expired) == (4, 2, 1)
        assert not await store.delete_job(job) and await store.job(job.id) == job
        for each in (job, plain):
            over = replace(each, status="cancelled")
            assert await store.replace_job(each, over, None)
            # the answer may have been lost, and it is asked again
            assert await store.delete_job(over) and await store.delete_job(over)
            assert await store.job(each.id) is None
        # Its place is known for a while.
        places = {f"place:{each.id}" for each in (job, plain)}
        assert (await keys_of(store) - places, await stored_bytes(store)) == empty
        assert {await store._redis.ttl(PREFIX + place) for place in places} <= {
            PLACE_KEPT_S,
            PLACE_KEPT_S - 1,
        }

    play(scenario)


def test_a_list_goes_on_from_the_place_of_a_job_that_was_deleted() -> None:
    async def scenario(redis: RedisProcess, store: RedisStore) -> None:
        file = await a_file(store, b"x", owner="a")
        jobs: list[JobRecord] = []
        for number in range(6):
            prefix = "batch_" if number == 2 else MESSAGE_BATCH
            jobs.append(replace(await a_job(store, file), id=new_job_id(prefix), status="in_progress"))
            assert await store.add_job(jobs[-1])
        ids = [job.id for job in jobs]
        for each in jobs[2:4]:
            over = replace(each, status="cancelled")
            assert await store.replace_job(each, over, None) and await store.delete_job(over)

        async def page(after: JobId, order: Order, owner: str | None = "a", limit: int = 9) -> Page | None:
            return await store.page(Listing("jobs:messages", owner, after, limit, order))

        for owner in ("a", None):
            assert await page(ids[3], "desc", owner) == Page([ids[1], ids[0]], has_more=False)
            assert await page(ids[3], "asc", owner) == Page([ids[4], ids[5]], has_more=False)
        assert await page(ids[3], "desc", limit=1) == Page([ids[1]], has_more=True)
        # Another owner's batch is as if it had never been there, and a job of another kind is in another list.
        assert await page(ids[3], "desc", "b") is None
        assert await page(ids[2], "desc") is None
        assert await page(new_job_id(MESSAGE_BATCH), "desc") is None

    play(scenario)


def test_jobs_that_are_due_are_brought_to_an_end_whatever_runs() -> None:
    async def scenario(redis: RedisProcess, store: RedisStore) -> None:
        late, early, cancelled = [await a_job(store, expires_at=at) for at in (900, 500, 800)]
        for job in (late, early, cancelled):
            assert await store.replace_job(job, replace(job, status="in_progress"), None)
        running = replace(cancelled, status="in_progress")
        assert await store.replace_job(running, replace(running, status="cancelling"), None)
        assert await store.count_open() == {"in_progress": 2, "cancelling": 1}
        (lease,) = await store.take("end", "a", 60, 499, 9)
        assert lease.id == cancelled.id
        (lease,) = await store.take("end", "a", 60, 500, 9)
        assert lease.id == early.id
        (running_lease,) = await store.take("run", "a", 60, 500, 9)
        assert running_lease.id == late.id

    play(scenario)


def test_a_store_from_before_there_were_owners_is_taken_over() -> None:
    async def scenario(redis: RedisProcess, store: RedisStore) -> None:
        file = await a_file(store, b"abc")
        job, over = await a_job(store, file), await a_job(store, file)
        assert await store.replace_job(over, replace(over, status="failed"), None)
        size = await stored_bytes(store)
        # as it was then
        new = [key for key in await keys_of(store) if "@" in key or key.startswith(("open:", "bytes"))]
        await store._redis.delete(*(PREFIX + key for key in new))
        for _ in range(2):
            await store.upgrade()
            await store._redis.delete(f"{PREFIX}format")
        assert await stored_bytes(store) == await stored_bytes(store, "") == size
        page = await store.page(Listing("files:batch", "", None, 9, "asc"))
        assert page and page.ids == [file.id]
        page = await store.page(Listing("jobs", "", None, 9))
        assert page and page.ids == [over.id, job.id]
        assert await store.count_open() == {"validating": 1}

    play(scenario)


def test_responses_from_before_they_had_parts_are_deleted() -> None:
    async def scenario(redis: RedisProcess, store: RedisStore) -> None:
        await store.upgrade()
        await a_job(store)
        size, keys = await stored_bytes(store), await keys_of(store)
        await store._redis.set(f"{PREFIX}format", 2)
        owners = ["a", "a", "", "b" * 64]
        for number, owner in enumerate(owners):
            name, status = f"resp_{number}", "queued" if number else "completed"
            # an empty owner was left out
            whose = {"owner": owner} if owner else {}
            old = {"id": name, **whose, "status": status, "input_items": b"\xa5owner", "body": b"x" * 1000}
            record = msgspec.msgpack.encode(old)
            await store._redis.set(f"{PREFIX}response:{name}", record)
            await store._redis.zadd(f"{PREFIX}expiring-responses", {name: 1e9})
            if status == "queued":
                await store._redis.zadd(f"{PREFIX}open:responding", {name: 1})
                await store._redis.zadd(f"{PREFIX}responding@{owner}", {name: 1})
                await store._redis.set(f"{PREFIX}lease:{name}", "1:gateway", px=60_000)
                await store._redis.set(f"{PREFIX}holder:{name}", "1:gateway")
            for counter in ("bytes", f"bytes@{owner}"):
                await store._redis.incrby(PREFIX + counter, len(record))
        assert await stored_bytes(store) > size + 3000
        for _ in range(2):
            await store.upgrade()
        assert await stored_bytes(store) == size
        for owner in ("a", "b" * 64):
            assert await stored_bytes(store, owner) == 0
        assert {key for key in await keys_of(store) if not key.startswith(("bytes@a", "bytes@b"))} == set(
            keys
        )
        assert await store._redis.get(f"{PREFIX}format") == b"3"

    play(scenario)


def test_a_refusal_is_an_answer() -> None:
    async def scenario(redis: RedisProcess, store: RedisStore) -> None:
        refused = [store.put_chunk(new_file_id(), "", 0, b"xx") for _ in range(20)]
        found = await asyncio.gather(*refused, return_exceptions=True)
        assert {type(each) for each in found} == {StoreFull} and not store.is_down

    play(scenario, StoreLimits(1))
