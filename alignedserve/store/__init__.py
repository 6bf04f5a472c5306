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
from alignedserve.store.contents import Contents, ContentsInStore
from alignedserve.store.deliveries import Delivery, DeliveryId, DeliveryStore
from alignedserve.store.homes import BrokenOff
from alignedserve.store.records import (
    FileId,
    FileRecord,
    JobId,
    JobRecord,
    LineResult,
    PlacedInput,
    Problem,
    Purpose,
    Status,
    Tally,
)
from alignedserve.store.responses import Part, ResponseGone, ResponseHead, ResponseId, ResponseStore

__all__ = [
    "STAGES",
    "BrokenOff",
    "Contents",
    "ContentsInStore",
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
    "Part",
    "PlacedInput",
    "Problem",
    "Purpose",
    "ResponseGone",
    "ResponseHead",
    "ResponseId",
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
