"""A log on disk of all events of the router, and its orders. A replay yields the same orders, which helps to find
scheduling bugs.

A file begins with a magic line. Records follow: 4 bytes of length, 4 bytes of CRC, msgpack. The first record is the
header; then events and their orders alternate. An event is written before the router handles it. If the router dies of
it, the file's last record is the cause.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from alignedserve.router.config import RouterConfig
from alignedserve.router.events import Event, Send
from alignedserve.router.router import Router
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.types import Epoch

logger = logging.getLogger(__name__)

MAGIC = b"alignedserve event log 4\n"
_NUMBER_BYTES = 4

T = TypeVar("T")


class Header(msgspec.Struct):
    config: RouterConfig
    epoch: Epoch
    scheduling: SchedulingConfig

    def router(self) -> Router:
        return Router(self.config, self.epoch, self.scheduling)


@dataclass(frozen=True)
class LoggedStep:
    now: float
    event: Event
    # None if the log ends before them.
    orders: list[Send] | None


class EventLog:
    """Appends events and orders. Another process may read the file meanwhile, and a torn last record is ignored. If the
    disk is full, the log ends and the router continues."""

    def __init__(
        self, file: BinaryIO, config: RouterConfig, epoch: Epoch, scheduling: SchedulingConfig
    ) -> None:
        self._file = file
        self._is_over = False
        self._append(MAGIC)
        self._write(Header(config, epoch, scheduling))

    def append(self, now: float, event: Event) -> None:
        self._write((now, event))

    def answered(self, orders: list[Send]) -> None:
        """Appends the router's orders for the last event."""
        self._write(orders)

    def _write(self, record: object) -> None:
        if not self._is_over:
            packed = msgspec.msgpack.encode(record)
            self._append(_number(len(packed)) + _number(zlib.crc32(packed)) + packed)

    def _append(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                # A disk that runs full writes a part first.
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._is_over = True
            logger.warning("the event log ends here: %s", error.strerror)


class LogReader:
    """Reads a log once. Raises ValueError if the file is not an event log, or is damaged."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Bytes of an incomplete last record.
        self.num_torn_bytes = 0
        self._records = self._read()
        self._num_records = 0
        header = next(self._records, None)
        if header is None:
            raise ValueError(f"{path}: is empty")
        self.header = self._decode(header, Header)

    def steps(self) -> Iterator[LoggedStep]:
        """Yields each event with its orders. Can be used once."""
        for record in self._records:
            now, event = self._decode(record, tuple[float, Event])
            orders = next(self._records, None)
            yield LoggedStep(now, event, None if orders is None else self._decode(orders, list[Send]))

    def _read(self) -> Iterator[bytes]:
        with self._path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ValueError(f"{self._path}: is not an event log of this version")
            while head := file.read(2 * _NUMBER_BYTES):
                size = int.from_bytes(head[:_NUMBER_BYTES], "big")
                record = file.read(size) if len(head) == 2 * _NUMBER_BYTES else b""
                if len(head) < 2 * _NUMBER_BYTES or len(record) < size:
                    self.num_torn_bytes = len(head) + len(record)
                    return
                self._num_records += 1
                if _number(zlib.crc32(record)) != head[_NUMBER_BYTES:]:
                    raise self._damaged("its checksum does not match")
                yield record

    def _decode(self, record: bytes, kind: type[T]) -> T:
        try:
            return msgspec.msgpack.decode(record, type=kind)
        except (msgspec.DecodeError, ValueError) as error:
            raise self._damaged(str(error)) from None

    def _damaged(self, why: str) -> ValueError:
        return ValueError(f"{self._path}, record {self._num_records}: {why}")


def replay(path: Path) -> Iterator[tuple[float, Event, list[Send]]]:
    """Yields each event with the orders of a new router."""
    log = LogReader(path)
    router = log.header.router()
    for step in log.steps():
        yield step.now, step.event, router.on(step.event, step.now)


def _number(value: int) -> bytes:
    return value.to_bytes(_NUMBER_BYTES, "big")
