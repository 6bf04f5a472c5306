"""The durable state of a system: files, batch jobs and their results, responses, conversations."""

from __future__ import annotations

from alignedserve.store.base import STAGES, Listing, Stage, Store, StoreFull, StoreLimits, TooManyJobs
from alignedserve.store.contents import Contents, ContentsInStore
from alignedserve.store.deliveries import Delivery, DeliveryId, DeliveryStore
from alignedserve.store.homes import BrokenOff
from alignedserve.store.homes.base import StoreAway
from alignedserve.store.records import (
    FileId,
    FileRecord,
    JobId,
    JobRecord,
    Lease,
    LeaseLost,
    LeaseState,
    LineResult,
    PlacedInput,
    Problem,
    Purpose,
    Status,
    Tally,
)
from alignedserve.store.responses import (
    ConversationFull,
    ConversationHead,
    ConversationId,
    ConversationStore,
    NewItems,
    Part,
    ResponseGone,
    ResponseHead,
    ResponseId,
    ResponseStore,
    Turn,
)

__all__ = [
    "STAGES",
    "BrokenOff",
    "Contents",
    "ContentsInStore",
    "ConversationFull",
    "ConversationHead",
    "ConversationId",
    "ConversationStore",
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
    "Listing",
    "NewItems",
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
    "Turn",
]
