"""A bucket of S3, or a server with its protocol, as a home for content.

The endpoint and the credentials come only from this process's environment (AWS_ENDPOINT_URL, AWS_REGION,
AWS_ACCESS_KEY_ID etc.), or from the machine's identity. Content larger than a part is uploaded in parts, which are
invisible until the last one. Parts of a killed process can't be listed with the content: a rule of the bucket must
delete them (docs/guides/storage.md).
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from alignedserve.store.homes.base import BrokenOff, Home, Listed, StoreAway, Writer
from alignedserve.store.homes.places import BucketPlace

log = logging.getLogger(__name__)

# S3's smallest part, except for the last one. It accepts 10,000 parts, which is 50 GB.
PART_BYTES = 5 << 20
# A writer holds some parts in memory.
MAX_WRITERS = 16
# Timeouts of a request, of connecting, and of all retries together, in seconds.
TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 2.0
RETRY_S = 8.0
MAX_RETRIES = 6
_NUM_LISTED = 1000
_MAX_REASON_CHARS = 300
_URL = re.compile(r"https?://\S+|(at location|for path) \S+")
# A number alone could be part of a name or a duration.
_NO_SUCH_RANGE, _NO_SUCH_BUCKET = "status code: 416", "<Code>NoSuchBucket</Code>"

Result = TypeVar("Result")


@dataclass(frozen=True)
class Head:
    """Metadata of an object."""

    num_bytes: int
    # Differs for different content.
    e_tag: str


class Objects:
    """Objects of a bucket, by key."""

    def __init__(self, bucket: str) -> None:
        """Raises ValueError for invalid settings in the environment."""
        self._bucket = bucket
        self._is_away = False
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
        try:
            self.client = S3Store(
                bucket,
                client_options={
                    # With any other endpoint, http would expose credentials.
                    "allow_http": endpoint.startswith("http://"),
                    "timeout": timedelta(seconds=TIMEOUT_S),
                    "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
                },
                retry_config={"max_retries": MAX_RETRIES, "retry_timeout": timedelta(seconds=RETRY_S)},
            )
        except BaseError as error:
            raise ValueError(f"s3://{bucket}: {_reason(error)}") from None

    async def asked(self, call: Awaitable[Result]) -> Result:
        """Returns the answer. Raises StoreAway, and FileNotFoundError if the object does not exist."""
        try:
            found = await call
        except FileNotFoundError as error:
            if _NO_SUCH_BUCKET not in str(error):
                raise
            raise self._away(error) from None
        except BaseError as error:
            raise self._away(error) from None
        if self._is_away:
            self._is_away = False
            log.warning("the bucket %s can be reached again", self._bucket)
        return found

    async def head(self, key: str) -> Head:
        found = await self.asked(obstore.head_async(self.client, key))
        return Head(found["size"], found["e_tag"] or "")

    async def read(self, key: str, start: int, num_bytes: int) -> tuple[bytes, Head]:
        """Returns `num_bytes` bytes and the object's metadata, from one request. Also raises FileNotFoundError if the
        object is shorter."""
        return await self.asked(self._read(key, start, num_bytes))

    async def _read(self, key: str, start: int, num_bytes: int) -> tuple[bytes, Head]:
        try:
            found = await obstore.get_async(self.client, key, options={"range": (start, start + num_bytes)})
        except BaseError as error:
            if _NO_SUCH_RANGE in _reason(error):
                raise FileNotFoundError(key) from None
            raise
        data = bytes(await found.bytes_async())
        if len(data) != num_bytes:
            raise FileNotFoundError(key)
        return data, Head(found.meta["size"], found.meta["e_tag"] or "")

    def _away(self, error: Exception) -> StoreAway:
        reason = _reason(error)
        if not self._is_away:
            self._is_away = True
            log.warning("the bucket %s can't be reached: %s", self._bucket, reason)
        return StoreAway(f"the bucket {self._bucket}: {reason}")


def _reason(error: Exception) -> str:
    """Returns the first line of the error, without URLs. The lines after it repeat it at length. URLs contain clients'
    text."""
    return _URL.sub("...", str(error).partition("\n")[0])[:_MAX_REASON_CHARS]


class Bucket(Home):
    def __init__(self, place: BucketPlace) -> None:
        """Raises ValueError for invalid settings in the environment."""
        self._prefix = f"{place.key}/" if place.key else ""
        self._objects = Objects(place.bucket)
        self._num_writers = 0

    @property
    def num_bytes(self) -> int | None:
        return None

    def writer(self, name: str) -> Writer:
        if self._num_writers >= MAX_WRITERS:
            raise StoreAway(f"{MAX_WRITERS} files are being written, and no more can be at a time")
        self._num_writers += 1
        return _BucketWriter(self._objects, self._prefix + name, self._writer_over)

    async def read(self, name: str, start: int, num_bytes: int) -> bytes | None:
        try:
            data, _ = await self._objects.read(self._prefix + name, start, num_bytes)
        except FileNotFoundError:
            return None
        return data

    async def delete(self, name: str) -> None:
        try:
            await self._objects.asked(obstore.delete_async(self._objects.client, self._prefix + name))
        except FileNotFoundError:
            return

    async def listed(self, folder: str) -> AsyncIterator[Sequence[Listed]]:
        prefix = f"{self._prefix}{folder}".rstrip("/") + "/"
        pages = obstore.list(self._objects.client, prefix, chunk_size=_NUM_LISTED)
        while found := await self._objects.asked(_next(pages)):
            yield [
                Listed(each["path"].removeprefix(prefix), each["last_modified"].timestamp()) for each in found
            ]

    def _writer_over(self) -> None:
        self._num_writers -= 1


async def _next(pages: obstore.ListStream[Sequence[obstore.ObjectMeta]]) -> Sequence[obstore.ObjectMeta]:
    try:
        return await pages.__anext__()
    except StopAsyncIteration:
        return ()


class _GivenUp(Exception):
    """Ends an upload in parts, which deletes them."""


class _BucketWriter(Writer):
    def __init__(self, objects: Objects, key: str, on_over: Callable[[], None]) -> None:
        self._objects = objects
        self._key = key
        self._on_over = on_over
        self._is_over = False
        # The part that is being filled, and full ones for the upload; None marks the end.
        self._part = bytearray()
        self._parts: asyncio.Queue[bytes | None] = asyncio.Queue(1)
        self._is_given_up = False
        # The upload in parts. It starts with the first full part.
        self._upload: asyncio.Task[object] | None = None

    async def write(self, data: bytes) -> None:
        self._part += data
        if len(self._part) >= PART_BYTES:
            await self._hand_over(self._taken())

    async def finish(self) -> None:
        if self._upload is None:
            await self._until(self._put(self._taken()))
        else:
            if self._part:
                await self._hand_over(self._taken())
            await self._hand_over(None)
            await self._until(asyncio.shield(self._upload))
        self._over()

    async def abort(self) -> None:
        if self._is_over:
            return
        self._over()
        self._part.clear()
        if self._upload:
            self._is_given_up = True
            while not self._parts.empty():
                self._parts.get_nowait()
            self._parts.put_nowait(None)
            await asyncio.wait({self._upload})

    def _taken(self) -> bytes:
        part, self._part = bytes(self._part), bytearray()
        return part

    def _put(self, data: bytes) -> Awaitable[object]:
        client = self._objects.client
        return self._objects.asked(obstore.put_async(client, self._key, data, use_multipart=False))

    async def _hand_over(self, part: bytes | None) -> None:
        if self._upload is None:
            self._upload = asyncio.create_task(self._uploaded())
            # If it fails while no call waits, the next call finds the failure.
            self._upload.add_done_callback(lambda task: task.cancelled() or task.exception())
        handing = asyncio.ensure_future(self._parts.put(part))
        try:
            await asyncio.wait({handing, self._upload}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            handing.cancel()
        if self._upload.done():
            await self._until(self._upload)

    async def _uploaded(self) -> None:
        client, parts = self._objects.client, self._all_parts()
        await self._objects.asked(
            obstore.put_async(client, self._key, parts, chunk_size=PART_BYTES, max_concurrency=1)
        )

    async def _all_parts(self) -> AsyncIterator[bytes]:
        while (part := await self._parts.get()) is not None:
            yield part
        if self._is_given_up:
            raise _GivenUp

    async def _until(self, call: Awaitable[object]) -> None:
        try:
            await call
        except (StoreAway, FileNotFoundError) as error:
            raise BrokenOff(str(error)) from None

    def _over(self) -> None:
        self._is_over = True
        self._on_over()
