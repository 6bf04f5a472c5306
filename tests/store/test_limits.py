"""An error for an exceeded limit names the limit."""

from __future__ import annotations

import pytest

from alignedserve.store import StoreLimits

LIMITS = StoreLimits(
    max_bytes=1,
    max_bytes_of_owner=2,
    max_open_jobs=3,
    max_open_jobs_of_owner=4,
    max_bytes_apart=5,
    max_bytes_apart_of_owner=6,
)


@pytest.mark.parametrize(
    ("is_owners", "is_apart", "message"),
    [
        (False, False, "files and batches: all together may have 1 bytes; delete some"),
        (True, False, "files and batches: yours may have 2 bytes; delete some"),
        (False, True, "files: all together may have 5 bytes; delete some"),
        (True, True, "files: yours may have 6 bytes; delete some"),
    ],
)
def test_too_many_bytes_are_refused_with_their_limit(is_owners: bool, is_apart: bool, message: str) -> None:
    assert str(LIMITS.full(is_owners, is_apart)) == message


def test_too_many_jobs_are_refused_with_their_limit() -> None:
    assert str(LIMITS.too_many_jobs(is_owners=False)).startswith("there are 3 open batches")
    assert str(LIMITS.too_many_jobs(is_owners=True)).startswith("you have 4 open batches")
