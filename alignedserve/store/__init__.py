"""What outlives all processes: files, batch jobs and their results."""

from __future__ import annotations

from alignedserve.store.base import (
    STAGES,
    Lease,
    LeaseLost,
    LeaseState,
    Stage,
    Store,
    StoreAway,
    StoreFull,
    StoreLimits,
    TooManyJobs,
)
from alignedserve.store.deliveries import Delivery, DeliveryId, DeliveryStore
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
from alignedserve.store.responses import ResponseId, ResponseRecord, ResponseStore

__all__ = [
    "STAGES",
    "Delivery",
    "DeliveryId",
    "DeliveryStore",
    "FileId",
    "FileRecord",
    "JobId",
    "JobRecord",
    "Lease",
    "LeaseLost",
    "LeaseState",
    "LineResult",
    "Problem",
    "Purpose",
    "ResponseId",
    "ResponseRecord",
    "ResponseStore",
    "Stage",
    "Status",
    "Store",
    "StoreAway",
    "StoreFull",
    "StoreLimits",
    "Tally",
    "TooManyJobs",
]
