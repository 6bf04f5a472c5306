"""Certificates are accepted by TLS: by OpenSSL, which Python uses, and by other readers of X.509."""

from __future__ import annotations

import ssl
import stat
from pathlib import Path

import pytest

from alignedserve.launch.certificate import Certificate, make_certificate


def context(side: int, mine: Certificate | None, trusted: Certificate) -> ssl.SSLContext:
    made = ssl.SSLContext(side)
    if mine is not None:
        # checks that the key is the certificate's
        made.load_cert_chain(mine.certificate, mine.key)
    made.load_verify_locations(trusted.certificate)
    made.verify_mode = ssl.CERT_REQUIRED
    return made


def talk(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> bytes:
    """What the server hears. Raises what either end finds wrong."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    here = server.wrap_bio(to_server, to_client, server_side=True)
    there = client.wrap_bio(to_client, to_server, server_hostname=host)
    for _ in range(4):
        for end in (there, here):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    there.write(b"hello")
    return here.read(5)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_two_ends_that_have_the_key_accept_each_other(tmp_path: Path, host: str) -> None:
    for number in range(20):
        directory = tmp_path / str(number)
        directory.mkdir()
        ours = make_certificate(directory)
        server = context(ssl.PROTOCOL_TLS_SERVER, ours, ours)
        assert talk(server, context(ssl.PROTOCOL_TLS_CLIENT, ours, ours), host) == b"hello"


def test_who_has_no_key_or_another_one_is_refused_by_either_end(tmp_path: Path) -> None:
    pair = []
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
        pair.append(make_certificate(tmp_path / name))
    ours, theirs = pair
    server = context(ssl.PROTOCOL_TLS_SERVER, ours, ours)
    for stranger in (None, theirs):
        with pytest.raises(ssl.SSLError):
            talk(server, context(ssl.PROTOCOL_TLS_CLIENT, stranger, ours), "127.0.0.1")
    impostor = context(ssl.PROTOCOL_TLS_SERVER, theirs, theirs)
    with pytest.raises(ssl.SSLError):
        talk(impostor, context(ssl.PROTOCOL_TLS_CLIENT, ours, ours), "127.0.0.1")


def test_the_files_are_the_user_s_alone(tmp_path: Path) -> None:
    made = make_certificate(tmp_path)
    for path in (made.certificate, made.key):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
