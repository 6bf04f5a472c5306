"""Findings for a store that would lose data."""

from __future__ import annotations

from pathlib import Path

from alignedserve.cli.doctor.store import file_system_of, lost_by

SAFE = {"cluster_enabled": 0, "aof_enabled": 1, "maxmemory": 1 << 30, "maxmemory_policy": "noeviction"}


def test_a_redis_that_keeps_all_is_not_remarked_on() -> None:
    assert not [*lost_by(SAFE)]


def test_each_thing_that_it_would_lose_is_said() -> None:
    (found,) = lost_by(SAFE | {"aof_enabled": 0})
    assert found.level == "warn" and "append-only" in found.text
    (found,) = lost_by(SAFE | {"maxmemory_policy": "allkeys-lru"})
    assert found.level == "warn" and "allkeys-lru" in found.text
    assert not [*lost_by(SAFE | {"maxmemory_policy": "allkeys-lru", "maxmemory": 0})]
    (found,) = lost_by(SAFE | {"cluster_enabled": 1})
    assert found.level == "fail"


def test_the_file_system_is_that_of_the_longest_mount_above() -> None:
    mounts = "overlay / overlay rw 0 0\ntmpfs /tmp tmpfs rw 0 0\n/dev/sda /tmp/with\\040blank ext4 rw 0 0\n"
    assert file_system_of(Path("/home/state"), mounts) == "overlay"
    assert file_system_of(Path("/tmp/state"), mounts) == "tmpfs"
    assert file_system_of(Path("/tmp/with blank/state"), mounts) == "ext4"
    assert file_system_of(Path("/tmporary"), mounts) == "overlay"
