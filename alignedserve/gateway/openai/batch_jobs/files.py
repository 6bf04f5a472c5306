"""`/v1/files`, as in OpenAI's API, for the two purposes that exist here."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from alignedserve.batch.file_writer import FileWriter
from alignedserve.gateway.http.errors import AnswerBrokenOff, ApiError
from alignedserve.gateway.http.json_pieces import AnswerStream, Json
from alignedserve.gateway.http.keys import owner_of
from alignedserve.gateway.http.multipart import Field, FileData, FileStart, form_events
from alignedserve.store import Contents, FileId, FileRecord, Listing, Store, StoreAway, StoreFull

_ID = re.compile(r"file-[0-9a-f]{24}")
# Seconds after its creation within which a file may expire: the least and the most.
MIN_EXPIRES_S, MAX_EXPIRES_S = 3600, 30 * 86400
# Files of a listing that are read at a time.
_STEP = 500

# The upload form for the OpenAPI description. It is parsed as it arrives, and not by FastAPI.
_EXPIRES = {
    "expires_after[anchor]": {"const": "created_at"},
    "expires_after[seconds]": {"type": "integer", "minimum": MIN_EXPIRES_S, "maximum": MAX_EXPIRES_S},
}
_UPLOAD_FORM: Json = {
    "type": "object",
    "required": ["purpose", "file"],
    "properties": {"purpose": {"const": "batch"}, "file": {"type": "string", "format": "binary"}} | _EXPIRES,
    "dependentRequired": {name: list(_EXPIRES) for name in _EXPIRES},
    "additionalProperties": False,
}
UPLOAD: Json = {"required": True, "content": {"multipart/form-data": {"schema": _UPLOAD_FORM}}}


def file_routes(store: Store, contents: Contents, max_file_bytes: int, is_shared: bool = False) -> APIRouter:
    """With `is_shared`, each API key sees the files of all keys."""
    routes = APIRouter()

    @routes.post("/v1/files", openapi_extra={"requestBody": UPLOAD})
    async def upload(http: Request) -> Json:
        uploading = Upload(store, contents, owner_of(http), max_file_bytes)
        async with uploading:
            await _read_form(http, uploading)
            return file_body(await uploading.commit())

    @routes.get("/v1/files")
    async def list_files(
        http: Request,
        purpose: str | None = None,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        if purpose not in (None, "batch", "batch_output"):
            return list_response([], has_more=False)
        name = "files" if purpose is None else f"files:{purpose}"
        page = await store.page(Listing(name, viewer(http, is_shared), after, limit, order))
        if page is None:
            raise ApiError(400, f"after={after!r}: there is no such file", param="after")
        return list_response(await _bodies(store, page.ids), page.has_more)

    @routes.get("/v1/files/{file_id}")
    async def one_file(file_id: str, http: Request) -> Json:
        return file_body(await find_file(store, file_id, viewer(http, is_shared)))

    @routes.get("/v1/files/{file_id}/content")
    async def content(file_id: str, http: Request) -> Response:
        file = await find_file(store, file_id, viewer(http, is_shared))
        return AnswerStream(
            content_of(contents, file),
            media_type="application/octet-stream",
            headers={"Content-Length": str(file.num_bytes)},
        )

    @routes.delete("/v1/files/{file_id}")
    async def delete(file_id: str, http: Request) -> Json:
        file = await find_file(store, file_id, viewer(http, is_shared))
        if await contents.delete(file.id) == "in_use":
            raise ApiError(400, f"file {file_id} is the input of an unfinished batch", param="file_id")
        return {"id": file_id, "object": "file", "deleted": True}

    return routes


async def _read_form(http: Request, upload: Upload) -> None:
    """Passes the form's parts to `upload`. Raises ApiError."""
    async for event in form_events(http):
        match event:
            case Field(name, value):
                upload.field(name, value)
            case FileStart(name, filename):
                upload.begin(name, filename)
            case FileData(data):
                await upload.add(data)


async def _bodies(store: Store, ids: Sequence[str]) -> list[Json]:
    found: list[Json] = []
    for start in range(0, len(ids), _STEP):
        found += map(file_body, await store.files([FileId(each) for each in ids[start : start + _STEP]]))
    return found


def viewer(http: Request, is_shared: bool) -> str | None:
    """Returns the owner of the files and batches that a request sees. None: those of all owners."""
    return None if is_shared else owner_of(http)


async def find_file(
    store: Store, file_id: str, viewer: str | None, param: str = "file_id", status: int = 404
) -> FileRecord:
    """Returns the file. Raises the same ApiError for a file that does not exist and for another owner's."""
    file = await store.file(FileId(file_id)) if _ID.fullmatch(file_id) else None
    if file is None or viewer not in (None, file.owner):
        raise ApiError(status, f"{param}={file_id!r}: there is no such file", param=param)
    return file


def file_body(file: FileRecord) -> Json:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def list_response(data: list[Json], has_more: bool) -> Response:
    """Encodes a page of a listing directly: it may have ten thousand items, and FastAPI's checks of each would delay
    other requests."""
    body = {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }
    return Response(msgspec.json.encode(body), media_type="application/json")


async def content_of(contents: Contents, file: FileRecord) -> AsyncIterator[bytes]:
    """Yields the file's chunks. Raises AnswerBrokenOff if one is missing, since the length was announced."""
    for number in range(file.num_chunks):
        try:
            chunk = await contents.chunk(file, number)
        except StoreAway as error:
            raise AnswerBrokenOff(f"the store of files can't be reached: {error}") from None
        if chunk is None:
            raise AnswerBrokenOff("the file was deleted meanwhile")
        yield chunk


class Upload:
    """A file that is being uploaded. Whole chunks are written to the store; the rest waits in `FileWriter`. If the
    context ends with an error, the upload is dropped, and StoreFull becomes an ApiError."""

    def __init__(self, store: Store, contents: Contents, owner: str, max_bytes: int) -> None:
        self._store = store
        self._file = FileWriter(contents.new_file(owner), owner)
        self._max_bytes = max_bytes
        self._fields: dict[str, str] = {}
        self._filename: str | None = None

    async def __aenter__(self) -> Upload:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        if error is None:
            return
        await self._file.drop()
        if isinstance(error, StoreFull):
            raise ApiError(413, str(error), param="file", code="storage_full") from None

    def field(self, name: str, value: str) -> None:
        if name == "file":
            raise ApiError(400, "file: must have a filename", param="file")
        if name not in ("purpose", "expires_after[anchor]", "expires_after[seconds]"):
            raise ApiError(400, f"{name}: unknown, or not supported by this server", param=name)
        if name == "purpose" and value != "batch":
            raise ApiError(400, f"purpose={value!r}: must be 'batch'", param="purpose")
        self._fields[name] = value

    def begin(self, name: str, filename: str) -> None:
        if name != "file":
            raise ApiError(400, f"{name}: unknown, or not supported by this server", param=name)
        if self._filename is not None:
            raise ApiError(400, "file: exactly one is needed", param="file")
        self._filename = filename

    async def add(self, data: bytes | memoryview) -> None:
        if self._file.num_bytes + len(data) > self._max_bytes:
            raise _too_large(self._max_bytes)
        await self._file.add(data)

    async def commit(self) -> FileRecord:
        if "purpose" not in self._fields:
            message = "purpose: is missing, and must be 'batch'; files of Anthropic's API do not exist here"
            raise ApiError(400, message, param="purpose")
        if self._filename is None:
            raise ApiError(400, "file: is missing", param="file")
        file = await self._file.close(self._filename, "batch", self._kept_s())
        await self._store.commit_file(file)
        return file

    def _kept_s(self) -> int | None:
        anchor = self._fields.get("expires_after[anchor]")
        seconds = self._fields.get("expires_after[seconds]")
        if anchor is None and seconds is None:
            return None
        if anchor != "created_at":
            message = f"expires_after[anchor]={anchor!r}: must be 'created_at'"
            raise ApiError(400, message, param="expires_after")
        after_s = (
            int(seconds) if seconds and seconds.isascii() and seconds.isdigit() and len(seconds) < 9 else 0
        )
        if not MIN_EXPIRES_S <= after_s <= MAX_EXPIRES_S:
            message = f"expires_after[seconds]={seconds!r}: must be from {MIN_EXPIRES_S} to {MAX_EXPIRES_S}"
            raise ApiError(400, message, param="expires_after")
        return after_s


def _too_large(max_bytes: int) -> ApiError:
    message = f"file: larger than {max_bytes} bytes, the most that a file may have"
    return ApiError(413, message, param="file", code="file_too_large")
