from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from alignedserve.kv.format import BlockFormat
from alignedserve.kvpool.block_allocator import BlockAllocator
from alignedserve.kvpool.owners import OwnerTable
from alignedserve.kvpool.process import PoolProcessConfig, open_segment, segments
from alignedserve.kvpool.segment import DIRECTORY, Segment, scratch_blocks, sweep
from alignedserve.protocol.address import RouterAddress
from alignedserve.types import Epoch, InstanceId, RequestKey
from tests.kvpool.allocator_steps import BLOCK_SIZE, assert_between, random_step, records

ROOT = Path(__file__).parents[2]
FORM = BlockFormat(num_layers=2, block_size=BLOCK_SIZE, num_kv_heads=2, head_dim=8, dtype="float32")


@pytest.fixture
def name() -> Iterator[str]:
    name = f"alignedserve-test-{secrets.token_hex(6)}"
    yield name
    Segment.unlink(name)
    assert not (DIRECTORY / name).exists()


def test_what_one_writes_the_other_reads(name: str) -> None:
    made = Segment.create(name, FORM, num_blocks=5)
    found = Segment.attach(name, FORM)
    assert (found.form, found.num_blocks, found.blocks.shape) == (FORM, 5, (5, FORM.block_bytes))
    assert not found.blocks.any() and found.table.num_requests == 0
    made.blocks[3] = np.arange(FORM.block_bytes) % 251
    assert np.array_equal(found.blocks[3], made.blocks[3])
    assert not found.blocks[[0, 1, 2, 4]].any()


def test_checksums_are_beside_the_blocks_and_stay_with_them(name: str) -> None:
    grouped = replace(FORM, num_groups=3)
    made = Segment.create(name, grouped, num_blocks=5)
    assert made.checksums.shape == (15,) and not made.checksums.any()
    made.checksums[:] = np.arange(15)
    made.blocks[:] = 255
    made.table._tail[:] = -1
    made.close()
    assert np.array_equal(Segment.attach(name, grouped).checksums, np.arange(15))


def test_a_block_has_those_of_all_groups(name: str) -> None:
    grouped = replace(FORM, num_groups=3)
    assert Segment.create(name, grouped, num_blocks=5).blocks.shape == (5, 3 * FORM.block_bytes)
    assert Segment.attach(name, grouped).form == grouped
    with pytest.raises(ValueError, match="its blocks have num_groups=3, and num_groups=1 is needed"):
        Segment.attach(name, FORM)


def test_a_segment_says_what_its_blocks_are(name: str) -> None:
    stored = FORM.in_pool("int8")
    assert Segment.create(name, stored, num_blocks=5).blocks.shape == (5, stored.block_bytes)
    assert Segment.attach(name).form == Segment.attach(name, stored).form == stored
    with pytest.raises(ValueError, match="its blocks have encoding=kv-int8, and encoding=kv is needed"):
        Segment.attach(name, FORM)


def test_blocks_begin_at_a_page_and_beside_the_table(name: str) -> None:
    segment = Segment.create(name, FORM, num_blocks=700)
    assert segment.blocks.ctypes.data % os.sysconf("SC_PAGESIZE") == 0
    segment.blocks[:] = 255
    allocator = BlockAllocator(segment.table, BLOCK_SIZE, deadline_s=0)
    assert allocator.num_free_blocks == 700
    assert allocator.reserve(RequestKey(1), 700 * BLOCK_SIZE, deadline_s=1)
    assert (segment.blocks == 255).all()


def test_what_nobody_uses_any_more_is_swept_away(name: str) -> None:
    made = Segment.create(name, FORM, num_blocks=2)
    used = Segment.attach(name)
    made.close()
    assert name not in sweep(min_age_s=0)
    used.close()
    assert name not in sweep(min_age_s=3600)
    assert (DIRECTORY / name).exists()
    assert name in sweep(min_age_s=0)
    assert not (DIRECTORY / name).exists()


def test_what_a_killed_process_used_is_swept_away(name: str) -> None:
    hold = (
        "import sys; from alignedserve.kvpool.segment import Segment; "
        "s = Segment.attach(sys.argv[1]); print(1, flush=True)"
    )
    Segment.create(name, FORM, num_blocks=2).close()
    command = [sys.executable, "-c", f"{hold}; input()", name]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline()
        assert name not in sweep(min_age_s=0)
        process.kill()
    assert name in sweep(min_age_s=0)


def test_memory_that_others_can_reach_is_not_taken_for_the_pool_s(name: str) -> None:
    """Anybody may put a file into /dev/shm, of the name that a pool which starts again looks for."""
    Segment.create(f"{name}-1", FORM, num_blocks=2).close()
    forged = DIRECTORY / f"{name}-2"
    forged.write_bytes((DIRECTORY / f"{name}-1").read_bytes())
    try:
        for mode in (0o666, 0o640, 0o602):
            forged.chmod(mode)
            assert segments(name) == [f"{name}-1"]
            with pytest.raises(ValueError, match="others can access it, or it belongs to another user"):
                Segment.attach(forged.name)
        forged.chmod(0o600)
        assert segments(name) == [f"{name}-2", f"{name}-1"]
        if os.geteuid() == 0:
            os.chown(forged, 65534, 65534)
            assert segments(name) == [f"{name}-1"]
    finally:
        forged.unlink()
        Segment.unlink(f"{name}-1")


def test_somebody_s_pipe_or_link_holds_nobody_up(name: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.touch(mode=0o600)
    pipe, link = DIRECTORY / f"{name}-pipe", DIRECTORY / f"{name}-link"
    os.mkfifo(pipe)
    link.symlink_to(other)
    try:
        assert not {pipe.name, link.name} & set(sweep(min_age_s=0))
        assert segments(name) == []
        with pytest.raises(OSError, match="symbolic"):
            Segment.attach(link.name)
    finally:
        pipe.unlink()
        link.unlink()


def test_arrays_outlive_closing_and_unlinking(name: str) -> None:
    segment = Segment.create(name, FORM, num_blocks=2)
    blocks = segment.blocks
    segment.close()
    segment.close()
    Segment.unlink(name)
    Segment.unlink(name)
    blocks[1] = 7
    assert blocks[1].all() and len(segment.blocks) == 0 and segment.table.size == 0
    del blocks
    with open("/proc/self/maps") as maps:
        assert name not in maps.read()


def test_blocks_for_a_while_are_unmapped_after_it_and_take_no_room_from_pools() -> None:
    def num_mapped() -> int:
        with open("/proc/self/maps") as maps:
            return maps.read().count("memfd:alignedserve-scratch")

    before, num_before = {*DIRECTORY.iterdir()}, num_mapped()
    with scratch_blocks(FORM, 3) as blocks:
        assert blocks.shape == (3, FORM.column_bytes) and num_mapped() == num_before + 1
        assert not [each for each in {*DIRECTORY.iterdir()} - before if "scratch" in each.name]
        blocks[2] = 7
        assert not blocks[:2].any()
    del blocks
    assert num_mapped() == num_before
    with pytest.raises(OSError, match="memory"), scratch_blocks(FORM, 1 << 40):
        pass


def test_a_restarted_pool_finds_what_the_one_before_had(name: str) -> None:
    allocator = BlockAllocator(Segment.create(name, FORM, num_blocks=9).table, BLOCK_SIZE, deadline_s=0)
    dice = Random(4)
    for now in range(30):
        random_step(allocator, dice, now)
    assert records(allocator)
    assert records(BlockAllocator(Segment.attach(name).table, BLOCK_SIZE, deadline_s=0)) == records(allocator)


@pytest.mark.parametrize("seed", range(6))
def test_a_pool_killed_at_any_time_leaves_whole_requests(name: str, seed: int) -> None:
    num_blocks = 60
    segment = Segment.create(name, FORM, num_blocks)
    command = [sys.executable, "-m", "tests.kvpool.killed_pool", name, str(seed)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as child:
        assert child.stdout
        num_seen = len(child.stdout.read(Random(seed).randint(50, 2000)))
        child.kill()
        num_done = num_seen + len(child.stdout.read())
    twin, dice = BlockAllocator(OwnerTable.plain(num_blocks), BLOCK_SIZE, deadline_s=0), Random(seed)
    for now in range(num_done):
        random_step(twin, dice, now)
    before = records(twin)
    random_step(twin, dice, num_done)
    found = BlockAllocator(segment.table, BLOCK_SIZE, deadline_s=0)
    found.check()
    assert_between(records(found), before, records(twin))


def test_a_name_is_made_once(name: str) -> None:
    Segment.create(name, FORM, num_blocks=1).blocks[0] = 9
    with pytest.raises(FileExistsError):
        Segment.create(name, FORM, num_blocks=1)
    assert Segment.attach(name).blocks.all()


def test_nothing_of_that_name(name: str) -> None:
    with pytest.raises(FileNotFoundError, match=name):
        Segment.attach(name)


def test_too_little_memory_is_told_with_both_numbers(name: str) -> None:
    disk = os.statvfs(DIRECTORY)
    num_blocks = disk.f_blocks * disk.f_frsize // FORM.block_bytes + 1
    with pytest.raises(ValueError, match=f"segment {name}: needs ") as told:
        Segment.create(name, FORM, num_blocks)
    found = re.search(r"needs (\d+) bytes of shared memory, and (\d+) are free", str(told.value))
    assert found
    needed, free = map(int, found.groups())
    assert needed > num_blocks * FORM.block_bytes and free < needed
    assert not (DIRECTORY / name).exists()


@pytest.mark.parametrize(
    ("field", "value"), [("num_layers", 3), ("block_size", 8), ("head_dim", 16), ("dtype", "bfloat16")]
)
def test_other_blocks_are_refused_by_name(name: str, field: str, value: Any) -> None:
    Segment.create(name, FORM, num_blocks=1)
    is_, wanted = f"{field}={getattr(FORM, field)}", f"{field}={value}"
    with pytest.raises(ValueError, match=f"{name}: its blocks have {is_}, and {wanted} is needed"):
        Segment.attach(name, replace(FORM, **{field: value}))


def test_what_is_no_segment_is_refused(name: str) -> None:
    path = DIRECTORY / name
    for content in (b"", b"x" * 100, bytes(8192)):
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(
            ValueError, match=f"{name}: not a segment of a KV pool, or one that was never completed"
        ):
            Segment.attach(name)


def test_other_versions_and_cut_off_files_are_refused(name: str) -> None:
    path = DIRECTORY / name
    Segment.create(name, FORM, num_blocks=3).close()
    whole = path.read_bytes()
    path.write_bytes(whole[:8] + bytes([9]) + whole[9:])
    with pytest.raises(ValueError, match=f"{name}: has version 9, and 6 is needed"):
        Segment.attach(name)
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=f"{name}: has {len(whole) - 1} bytes, and {len(whole)} are needed"):
        Segment.attach(name)


@pytest.mark.parametrize("bad", ["", "a/b", ".."])
def test_names_are_file_names(bad: str) -> None:
    with pytest.raises(ValueError, match="must be a file name"):
        Segment.create(bad, FORM, num_blocks=1)


def test_a_pool_without_blocks_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="num_blocks=0: must be at least 1"):
        Segment.create(name, FORM, num_blocks=0)


def test_a_segment_of_another_format_makes_way_for_a_new_one(name: str) -> None:
    """A pool that starts again with another model does not leave the memory of the one before."""
    Segment.create(f"{name}-1", FORM, num_blocks=2).close()
    config = PoolProcessConfig(
        router=RouterAddress("127.0.0.1", 1, ""),
        instance_id=InstanceId("pool-0"),
        segment_prefix=name,
        form=replace(FORM, num_layers=FORM.num_layers + 1),
        num_blocks=3,
    )
    opened = open_segment(config, Epoch(2))
    try:
        assert opened.num_blocks == 3
        assert segments(name) == [opened.name] != [f"{name}-1"]
        opened.close()
        again = open_segment(config, Epoch(3))
        assert again.name == opened.name, "what fits is taken over"
        again.close()
    finally:
        Segment.unlink(opened.name)
