"""What outlives every process: files, batch jobs and their results."""

from __future__ import annotations

from alignedserve.store.base import Lease, LeaseLost, Store, StoreAway
from alignedserve.store.records import (
    FileId,
    FileRecord,
    JobId,
    JobRecord,
    LineResult,
    Problem,
    Purpose,
    Status,
    Tally,
)

__all__ = [
    "FileId",
    "FileRecord",
    "JobId",
    "JobRecord",
    "Lease",
    "LeaseLost",
    "LineResult",
    "Problem",
    "Purpose",
    "Status",
    "Store",
    "StoreAway",
    "Tally",
]
