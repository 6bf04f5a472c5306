"""Finds where requests begin and end in the bytes of a connection, and refuses bytes that are no request.

h11 parses the result. By itself it can take seconds for some kilobytes. Its patterns backtrack: a header of spaces that
ends in a control character costs the square of its length. Each chunk of a body costs 20 us however short it is, and a
head may be as long as one read. So h11 receives nothing on which a pattern could backtrack, and chunks are joined
before. Everything here is linear in the number of bytes, however they are cut into segments.

Another HTTP parser may stand in front of this server, so what two parsers could read differently is refused (RFC 9112,
sections 2.2, 5.2, 6.3): lines that end in a bare LF, folded lines, two lengths, a length beside Transfer-Encoding.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from urllib.parse import unquote

from starlette.datastructures import Headers

# Bytes of the request line and all headers together, at most. Browsers also send cookies of other servers on the same
# machine.
MAX_HEAD_BYTES = 32 << 10
MAX_LINE_BYTES = 8 << 10
MAX_HEADERS = 100
# Bytes of a chunk's size and extension, and of all trailers together, at most. Both are dropped.
MAX_CHUNK_LINE_BYTES = 256
MAX_TRAILER_BYTES = 4 << 10
# Least average size of a body's chunks in bytes, without the first NUM_FREE_CHUNKS.
MIN_CHUNK_BYTES = 64
NUM_FREE_CHUNKS = 1024

_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_REQUEST = re.compile(_TOKEN + rb" [\x21-\x7e]+ HTTP/([0-9]\.[0-9])")
# The target of a request to a proxy, which a server must accept, too (RFC 9112, section 3.2.2).
_ABSOLUTE = re.compile(rb"([^ ]+) https?://([^/?#@ ]+)((?:[/?][^ ]*)?) ([^ ]+)", re.IGNORECASE)
_HEADER = re.compile(rb"(" + _TOKEN + rb"):([\t\x20-\x7e\x80-\xff]*)")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,12})[\t ]*(?:;[\t\x20-\x7e\x80-\xff]*)?\r\n")
# Bytes that no head has: they are refused before its end arrives.
_JUNK = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|(?<!\r)\n")
_LENGTH = re.compile(rb"[0-9]{1,15}")


class BadRequest(Exception):
    """The connection can't continue, because the start of the next request is unknown."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Part(Enum):
    HEAD = auto()
    # A body of Content-Length bytes.
    BODY = auto()
    # A chunked body: the size of the next chunk, the chunk, the line end after it, and the trailers.
    SIZE = auto()
    CHUNK = auto()
    CHUNK_END = auto()
    TRAILERS = auto()


class Framing:
    def __init__(self) -> None:
        self._part = _Part.HEAD
        # Number of bytes of an incomplete head that were searched.
        self._num_seen = 0
        # Number of bytes of the body or the chunk that have not arrived.
        self._num_left = 0
        self._num_chunks = 0
        self._num_body_bytes = 0
        self._num_trailer_bytes = 0

    @property
    def is_between(self) -> bool:
        """Whether the last request is complete, and the head of the next one is not."""
        return self._part is _Part.HEAD

    @property
    def num_left(self) -> int | None:
        """Number of bytes of the body that have not arrived. None: the client does not announce it."""
        return self._num_left if self._part in (_Part.HEAD, _Part.BODY) else None

    def take(self, arrived: bytearray) -> bytes:
        """Removes from `arrived` and returns the next input of h11, which belongs to one request: a whole head, or the
        part of the body that has arrived. Empty: more has to arrive, or the request is complete. Raises BadRequest."""
        match self._part:
            case _Part.HEAD:
                return self._head(arrived)
            case _Part.BODY:
                return self._body(arrived)
        return self._chunks(arrived)

    def _head(self, arrived: bytearray) -> bytes:
        end = arrived.find(b"\r\n\r\n", max(self._num_seen - 3, 0))
        size = len(arrived) if end < 0 else end + 4
        if size > MAX_HEAD_BYTES:
            raise BadRequest(431, f"the request's head has more than {MAX_HEAD_BYTES} bytes")
        if _JUNK.search(arrived, self._num_seen, size):
            raise BadRequest(400, "the request's head has an invalid character")
        if end < 0:
            self._num_seen = size
            return b""
        lines = bytes(arrived[: size - 4]).split(b"\r\n")
        del arrived[:size]
        self._num_seen = 0
        self._begin(lines)
        return b"\r\n".join([*_in_origin_form(lines), b"", b""])

    def _begin(self, lines: list[bytes]) -> None:
        if len(lines) - 1 > MAX_HEADERS:
            raise BadRequest(431, f"the request has more than {MAX_HEADERS} headers")
        if max(map(len, lines)) > MAX_LINE_BYTES:
            raise BadRequest(431, f"a line of the request's head has more than {MAX_LINE_BYTES} bytes")
        request = _REQUEST.fullmatch(lines[0])
        if request is None:
            raise BadRequest(400, "the first line is not an HTTP request")
        if request[1] not in (b"1.0", b"1.1"):
            raise BadRequest(505, "this server supports only HTTP/1.1")
        headers = [_HEADER.fullmatch(line) for line in lines[1:]]
        if not all(headers):
            raise BadRequest(400, "a line of the request's head is not a header")
        found = [(header[1].lower(), header[2].strip(b"\t ")) for header in headers if header]
        hosts = [value for name, value in found if name == b"host"]
        if len(hosts) > 1 or (not hosts and request[1] == b"1.1"):
            raise BadRequest(400, "there must be one Host header")
        self._expect_body(
            request[1],
            [value for name, value in found if name == b"content-length"],
            [value.lower() for name, value in found if name == b"transfer-encoding"],
        )

    def _expect_body(self, version: bytes, lengths: list[bytes], encodings: list[bytes]) -> None:
        if encodings and (lengths or version == b"1.0"):
            raise BadRequest(400, "Transfer-Encoding can't come with Content-Length, nor in HTTP/1.0")
        if encodings and encodings != [b"chunked"]:
            raise BadRequest(501, "the only supported Transfer-Encoding is chunked")
        if len(lengths) > 1 or (lengths and not _LENGTH.fullmatch(lengths[0])):
            raise BadRequest(400, "Content-Length must be one number")
        self._num_chunks = self._num_body_bytes = self._num_trailer_bytes = 0
        self._num_left = int(lengths[0]) if lengths else 0
        if encodings:
            self._part = _Part.SIZE
        elif self._num_left:
            self._part = _Part.BODY

    def _body(self, arrived: bytearray) -> bytes:
        found = bytes(arrived[: self._num_left])
        del arrived[: self._num_left]
        self._num_left -= len(found)
        if not self._num_left:
            self._part = _Part.HEAD
        return found

    def _chunks(self, arrived: bytearray) -> bytes:
        """Joins the chunks that have arrived into one."""
        pieces: list[bytearray] = []
        at = 0
        while self._part is not _Part.HEAD:
            begin = at
            match self._part:
                case _Part.SIZE:
                    at = self._size(arrived, at, pieces)
                case _Part.CHUNK:
                    pieces.append(arrived[at : at + self._num_left])
                    at += len(pieces[-1])
                    self._num_left -= len(pieces[-1])
                    if not self._num_left:
                        self._part = _Part.CHUNK_END
                case _Part.CHUNK_END:
                    at = self._line_end(arrived, at)
                case _:
                    at = self._trailer(arrived, at)
            if at == begin:
                break
        del arrived[:at]
        found = b"".join(pieces)
        whole = b"%x\r\n%b\r\n" % (len(found), found) if found else b""
        return whole if self._part is not _Part.HEAD else whole + b"0\r\n\r\n"

    def _size(self, arrived: bytearray, at: int, pieces: list[bytearray]) -> int:
        """Reads the size of a chunk, and all complete chunks, which may be many."""
        num_arrived = len(arrived)
        while line := _CHUNK.match(arrived, at, at + MAX_CHUNK_LINE_BYTES):
            at = line.end()
            self._num_left = int(line[1], 16)
            if not self._num_left:
                self._part = _Part.TRAILERS
                return at
            self._count_chunk()
            end = at + self._num_left
            if num_arrived < end + 2 or arrived[end : end + 2] != b"\r\n":
                self._part = _Part.CHUNK
                return at
            pieces.append(arrived[at:end])
            at = end + 2
        if num_arrived - at >= MAX_CHUNK_LINE_BYTES or arrived.find(b"\n", at) >= 0:
            raise BadRequest(400, "the chunked body is malformed: a chunk has no size")
        return at

    def _count_chunk(self) -> None:
        self._num_chunks += 1
        self._num_body_bytes += self._num_left
        if (self._num_chunks - NUM_FREE_CHUNKS) * MIN_CHUNK_BYTES > self._num_body_bytes:
            raise BadRequest(400, f"the body's chunks have fewer than {MIN_CHUNK_BYTES} bytes on average")

    def _line_end(self, arrived: bytearray, at: int) -> int:
        found = bytes(arrived[at : at + 2])
        if found == b"\r\n":
            self._part = _Part.SIZE
            return at + 2
        if found not in (b"", b"\r"):
            raise BadRequest(400, "the chunked body is malformed: a chunk is longer than its announced size")
        return at

    def _trailer(self, arrived: bytearray, at: int) -> int:
        """Reads one line of the trailers. An empty line is the last."""
        end = arrived.find(b"\r\n", at)
        num_bytes = self._num_trailer_bytes + (len(arrived) if end < 0 else end) - at
        if num_bytes > MAX_TRAILER_BYTES:
            raise BadRequest(431, f"the body's trailers have more than {MAX_TRAILER_BYTES} bytes")
        if end < 0:
            return at
        if end == at:
            self._part = _Part.HEAD
        elif not _HEADER.fullmatch(arrived, at, end):
            raise BadRequest(400, "a line after the body is not a header")
        self._num_trailer_bytes = num_bytes + 2
        return end + 2


def asked_path(arrived: bytearray) -> str:
    """Returns the path of the request that `arrived` begins with, as uvicorn parses it. "": its first line is no
    request."""
    line = bytes(arrived[: max(arrived.find(b"\r\n"), 0)])
    if len(line) > MAX_LINE_BYTES or not _REQUEST.fullmatch(line):
        return ""
    _, target, _ = _in_origin_form([line])[0].split(b" ")
    return unquote(target.partition(b"?")[0].decode("ascii"))


def asked_headers(arrived: bytearray) -> Headers:
    """Returns the headers of the request that `arrived` begins with, the head of which is complete. It may be one that
    is refused later."""
    lines = bytes(arrived[: arrived.find(b"\r\n\r\n")]).split(b"\r\n", MAX_HEADERS + 1)
    pairs = (line.partition(b":") for line in lines[1 : MAX_HEADERS + 1])
    return Headers(raw=[(name.lower(), value.strip(b"\t ")) for name, _, value in pairs])


def _in_origin_form(lines: list[bytes]) -> list[bytes]:
    """Returns the lines of a request's head with its target in origin form. The host of an absolute target replaces the
    Host header."""
    found = _ABSOLUTE.fullmatch(lines[0])
    if found is None:
        return lines
    method, host, rest, version = found.groups()
    target = rest if rest.startswith(b"/") else b"/" + rest
    headers = [line for line in lines[1:] if line[:5].lower() != b"host:"]
    return [b"%b %b %b" % (method, target, version), b"Host: " + host, *headers]
