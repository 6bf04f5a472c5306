"""The page's files, read once. They contain no data: the page's scripts request it, with an API key where needed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

FOLDER = Path(__file__).parent
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# The page has nothing inline, and neither loads from other servers nor sends to them.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class PageFile:
    content: bytes
    content_type: str

    @property
    def etag(self) -> str:
        return f'"{hashlib.sha256(self.content).hexdigest()[:16]}"'

    def answer(self, http: Request) -> Response:
        headers = HEADERS | {"ETag": self.etag}
        if http.headers.get("if-none-match") == self.etag:
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.content_type, headers=headers)


def read_files() -> dict[str, PageFile]:
    found = [path for path in FOLDER.iterdir() if path.suffix in TYPES]
    return {path.name: PageFile(path.read_bytes(), TYPES[path.suffix]) for path in found}


def add_page(app: FastAPI) -> set[Callable[..., Any]]:
    """Adds the page's routes, and returns their endpoints."""
    files = read_files()

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def index(http: Request) -> Response:
        return files["index.html"].answer(http)

    @app.api_route("/page/{name}", methods=["GET", "HEAD"], include_in_schema=False)
    async def one_file(name: str, http: Request) -> Response:
        if name not in files:
            raise HTTPException(404)
        return files[name].answer(http)

    return {index, one_file}
