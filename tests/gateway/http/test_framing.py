"""What reaches h11 is a request and nothing else, however it is cut into segments."""

from __future__ import annotations

import h11
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from alignedserve.gateway.http import framing
from alignedserve.gateway.http.framing import BadRequest, Framing, asked_path

GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
HEAD = b"POST / HTTP/1.1\r\nHost: a\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
MANY = framing.NUM_FREE_CHUNKS


def taken(sent: bytes, size: int = 1 << 16) -> list[bytes]:
    """All pieces, of what comes in segments of `size`."""
    reader, arrived, found = Framing(), bytearray(), []
    for begin in range(0, len(sent), size):
        arrived += sent[begin : begin + size]
        while piece := reader.take(arrived):
            found.append(piece)
    return found


def events(sent: bytes, size: int = 1 << 16) -> tuple[bytes, list[type[h11.Event]]]:
    """What h11 makes of it: all data, and the kinds of what is not data."""
    server, data, kinds = h11.Connection(h11.SERVER), b"", []
    for piece in taken(sent, size):
        server.receive_data(piece)
        while not isinstance(event := server.next_event(), type):
            if isinstance(event, h11.Data):
                data += event.data
            else:
                kinds.append(type(event))
            if isinstance(event, h11.EndOfMessage):
                server.send(h11.Response(status_code=200, headers=[("Content-Length", "0")]))
                server.send(h11.EndOfMessage())
                server.start_next_cycle()
    return data, kinds


# ---- what is a request ----


@pytest.mark.parametrize(
    ("line", "path"),
    [
        ("GET /health HTTP/1.1", "/health"),
        ("HEAD /health?a=/b?c HTTP/1.1", "/health"),
        ("GET /a%2Fb%3F HTTP/1.0", "/a/b?"),
        ("GET http://a.example/health?x HTTP/1.1", "/health"),
        ("GET http://a.example HTTP/1.1", "/"),
        ("GET /health", ""),
        ("GET  /health HTTP/1.1", ""),
        ("", ""),
        ("GET /" + framing.MAX_LINE_BYTES * "a" + " HTTP/1.1", ""),
    ],
)
def test_the_path_of_a_request_is_the_one_that_is_routed(line: str, path: str) -> None:
    assert asked_path(bytearray(line.encode() + b"\r\nHost: a\r\n\r\n")) == path
    assert asked_path(bytearray(line.encode())) == ""


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1 << 16])
def test_requests_are_the_same_however_they_are_cut(size: int) -> None:
    extension = b'3 ;name="value"\r\nabc\r\n'
    trailers = b"0\r\nX-Sum: 1\r\nY:\r\n\r\n"
    sent = CHUNKED + b"5\r\nhello\r\n" + extension + trailers + GET
    sent += HEAD + b"Content-Length: 6\r\n\r\n world" + GET
    data, kinds = events(sent, size)
    assert data == b"helloabc world" and kinds == [h11.Request, h11.EndOfMessage] * 4


def test_one_request_is_taken_at_a_time_and_chunks_together() -> None:
    reader, arrived = Framing(), bytearray(CHUNKED + b"1\r\nx\r\n" * 500 + b"0\r\n\r\n" + GET + GET)
    assert reader.take(arrived) == CHUNKED and not reader.is_between and reader.num_left is None
    assert reader.take(arrived) == b"1f4\r\n" + b"x" * 500 + b"\r\n0\r\n\r\n"
    assert reader.is_between and reader.num_left == 0 and arrived == GET + GET
    assert reader.take(arrived) == GET and reader.is_between and arrived == GET


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"http://b:80/v1/x?y=http://c/", b"/v1/x?y=http://c/"),
        (b"HTTPS://b:80", b"/"),
        (b"http://b:80?y", b"/?y"),
    ],
)
@pytest.mark.parametrize("size", [1, 1 << 16])
def test_a_target_as_for_a_proxy_is_a_path_and_a_host(target: bytes, path: bytes, size: int) -> None:
    found = b"".join(taken(b"POST " + target + b" HTTP/1.1\r\nX: 1\r\nhost: a\r\n\r\n", size))
    assert found == b"POST " + path + b" HTTP/1.1\r\nHost: b:80\r\nX: 1\r\n\r\n"


@pytest.mark.parametrize(
    "target", [b"/http://b/", b"*", b"http:///v1", b"http://user@b/", b"ftp://b/", b"b:80"]
)
def test_other_targets_stay_as_they_are(target: bytes) -> None:
    sent = b"GET " + target + b" HTTP/1.1\r\nHost: a\r\n\r\n"
    assert taken(sent) == [sent]


# ---- what is none ----

HEADERS = [
    (b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", 400),
    (b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n", 400),
    (b"Content-Length: 5\r\nContent-Length: 5\r\n", 400),
    (b"Content-Length: 5, 5\r\n", 400),
    (b"Content-Length: +5\r\n", 400),
    (b"Content-Length: -1\r\n", 400),
    (b"Content-Length: 0x5\r\n", 400),
    (b"Content-Length: 5_0\r\n", 400),
    (b"Content-Length: \xb2\r\n", 400),
    (b"Content-Length:\r\n", 400),
    (b"Content-Length: 9999999999999999\r\n", 400),
    (b"Content-Length : 5\r\n", 400),
    (b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", 501),
    (b"Transfer-Encoding: gzip, chunked\r\n", 501),
    (b"Transfer-Encoding: identity\r\n", 501),
    (b"Transfer-Encoding:\r\n", 501),
    (b"Transfer-Encoding: chunked\r\n folded\r\n", 400),
    (b"X: a\r\n\tfolded\r\n", 400),
    (b"X: a\nContent-Length: 5\r\n", 400),
    (b"X: a\rContent-Length: 5\r\n", 400),
    (b"X: a\x00b\r\n", 400),
    (b"X: a\x0bb\r\n", 400),
    (b": a\r\n", 400),
    (b"no colon\r\n", 400),
    (b"Host: b\r\n", 400),
    # h11's patterns would take the square of it
    (b"X:" + b" " * 8000 + b"\x7f\r\n", 400),
    (b"X:" + b" " * (framing.MAX_LINE_BYTES - 1) + b"\r\n", 431),
    (b"X: " + b"a" * framing.MAX_HEAD_BYTES + b"\r\n", 431),
    (b"X: a\r\n" * framing.MAX_HEADERS, 431),
]


@pytest.mark.parametrize(("headers", "status"), HEADERS)
@pytest.mark.parametrize("size", [1, 1 << 16])
def test_heads_that_are_none_are_refused(headers: bytes, status: int, size: int) -> None:
    with pytest.raises(BadRequest) as error:
        taken(HEAD + headers + b"\r\n", size)
    assert error.value.status == status


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"\r\n" + GET, 400),
        (b"GET  / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET / HTTP/1.1 \r\nHost: a\r\n\r\n", 400),
        (b"GET /\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET /\xe4 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        # TLS; a head that is not over has begun wrong
        (b"\x16\x03\x01\x02\x00\x01", 400),
        (b"GET / HTTP/1.1\nHost: a\n\n", 400),
    ],
)
def test_first_lines_that_are_none_are_refused(head: bytes, status: int) -> None:
    with pytest.raises(BadRequest) as error:
        taken(head)
    assert error.value.status == status


def test_a_head_that_has_no_end_is_not_kept() -> None:
    reader, arrived = Framing(), bytearray(HEAD + b"X: ")
    with pytest.raises(BadRequest, match="head has more than"):
        while not reader.take(arrived):
            arrived += b"a" * 100
    assert len(arrived) <= framing.MAX_HEAD_BYTES + 100


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"1\r\n \r\n" * 160_000, 400, "chunks have fewer than 64 bytes"),
        # first a large one, which pays for some of them
        (b"10000\r\n" + b"x" * 65536 + b"\r\n" + b"1\r\n \r\n" * 160_000, 400, "chunks have fewer"),
        (b"1;" + b" " * 200 + b"\n\r\n", 400, "no size"),
        (b"1;" + b"x" * 300, 400, "no size"),
        (b"1;a=\x00\r\n", 400, "no size"),
        (b"1\n \n", 400, "no size"),
        (b"\r\n", 400, "no size"),
        (b"-1\r\n", 400, "no size"),
        (b"0x1\r\n", 400, "no size"),
        (b"1" * 13 + b"\r\n", 400, "no size"),
        (b"1\r\nxx\r\n", 400, "longer than its announced size"),
        (b"1\r\nx\n", 400, "longer than its announced size"),
        (b"0\r\n" + b"X: y\r\n" * 1000, 431, "trailers have more"),
        (b"0\r\nX: " + b"y" * 5000, 431, "trailers have more"),
        (b"0\r\nno trailer\r\n\r\n", 400, "not a header"),
        (b"0\r\nX: y\nZ: z\r\n\r\n", 400, "not a header"),
    ],
)
@pytest.mark.parametrize("size", [5, 1 << 16])
def test_bodies_that_are_no_chunks_are_refused(body: bytes, status: int, message: str, size: int) -> None:
    with pytest.raises(BadRequest, match=message) as error:
        taken(CHUNKED + body, size)
    assert error.value.status == status


def test_a_flood_of_chunks_is_over_as_soon_as_there_are_too_many() -> None:
    reader, arrived = Framing(), bytearray(CHUNKED)
    reader.take(arrived)
    num_chunks = 0
    with pytest.raises(BadRequest):
        while True:
            arrived += b"1\r\n \r\n"
            reader.take(arrived)
            num_chunks += 1
    # each byte pays for a 64th of a chunk
    assert MANY <= num_chunks <= MANY * 64 / 63 + 1
    # and those of clients that write line by line are none
    assert events(CHUNKED + b"40\r\n" + (b"x" * 64 + b"\r\n40\r\n") * 5000)[0] == b"x" * 64 * 5000


# ---- h11 ----

PIECES = [
    *(b"GET", b"POST", b" ", b"/", b"HTTP/1.1", b"HTTP/1.0", b"\r\n", b"\r\n\r\n", b"\r", b"\n", b":", b"\t"),
    *(b"Host: a", b"Content-Length", b"Transfer-Encoding", b"chunked", b"5", b"0", b"hello", b"X", b"\x00"),
    *(b"\xff", b";", b","),
]


@given(st.lists(st.sampled_from(PIECES), max_size=12), st.integers(1, 9))
@example([b"Content-Length", b":", b"5", b"\r\n\r\n", b"hello"], 1)
@settings(max_examples=400, deadline=None)
def test_what_is_let_through_is_the_same_to_h11(pieces: list[bytes], size: int) -> None:
    sent = HEAD + b"".join(pieces)
    try:
        found = events(sent, size)
    except BadRequest:
        return
    assert found == events(sent)
