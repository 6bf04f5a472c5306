"""Everything the router was told, on disk; replayed, it gives the same orders: so scheduling bugs are found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from alignedserve.mix import MixConfig
from alignedserve.types import Epoch
from router.config import RouterConfig
from router.events import Event, Send
from router.router import Router

_LENGTH_BYTES = 4


class Header(msgspec.Struct):
    config: RouterConfig
    epoch: Epoch
    mix: MixConfig


class EventLog:
    """Appends events; a reader may follow, and a torn last record is ignored."""

    def __init__(self, file: BinaryIO, config: RouterConfig, epoch: Epoch, mix: MixConfig) -> None:
        self._file = file
        self._write(Header(config, epoch, mix))

    def append(self, now: float, event: Event) -> None:
        self._write((now, event))

    def _write(self, record: object) -> None:
        packed = msgspec.msgpack.encode(record)
        self._file.write(len(packed).to_bytes(_LENGTH_BYTES, "big") + packed)


def _records(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while len(length := file.read(_LENGTH_BYTES)) == _LENGTH_BYTES:
            size = int.from_bytes(length, "big")
            record = file.read(size)
            if len(record) == size:
                yield record


def replay(path: Path) -> Iterator[tuple[float, Event, list[Send]]]:
    """Each event again, with the orders of a new router."""
    records = _records(path)
    header = msgspec.msgpack.decode(next(records), type=Header)
    router = Router(header.config, header.epoch, header.mix)
    decoder = msgspec.msgpack.Decoder(tuple[float, Event])
    for record in records:
        now, event = decoder.decode(record)
        yield now, event, router.on(event, now)
