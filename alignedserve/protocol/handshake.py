"""Two processes prove to each other that they know the cluster's token, without sending it.

    client -> server   nonce                  32 bytes
    server -> client   nonce, proof           64 bytes
    client -> server   digest, proof          64 bytes; SHA-256 of the frame that comes next

A nonce is random. A proof is the HMAC-SHA256, under the token, of: which end proves it, both nonces and, at the
client, the digest. So a proof is good for one connection, in one direction, and for one first frame. The server proves
itself first: a process which listens where a router should receives a random number and nothing else.

Every part has a fixed size: before the proof nothing is decoded, and at most 64 bytes are waited for.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from typing import Protocol

NONCE_BYTES = 32
DIGEST_BYTES = 32

_SERVER, _CLIENT = b"alignedserve handshake 1, server", b"alignedserve handshake 1, client"


class HandshakeError(ConnectionError):
    """The other end does not know the token."""


class Handshake(Protocol):
    """One end of the handshake, without its connection. It must not be used again once it has failed."""

    # The bytes that this end sends first, unasked.
    opening: bytes
    # The number of bytes of the other end that are due next. 0: the handshake is over, and the other end has proved
    # itself.
    num_bytes: int

    def take(self, data: bytes) -> bytes:
        """Takes those bytes and returns the answer. Raises HandshakeError."""


class ClientHandshake:
    def __init__(self, token: str, introduce: Callable[[], bytes]) -> None:
        """`introduce` makes the first frame, which goes to a server that has proved itself, as part of the last
        answer."""
        self.opening = secrets.token_bytes(NONCE_BYTES)
        self.num_bytes = NONCE_BYTES + DIGEST_BYTES
        self._token = token
        self._introduce = introduce

    def take(self, data: bytes) -> bytes:
        nonce, proof = data[:NONCE_BYTES], data[NONCE_BYTES:]
        _check(proof, _proof(self._token, _SERVER, self.opening, nonce))
        self.num_bytes = 0
        introduction = self._introduce()
        digest = digest_of(introduction)
        return digest + _proof(self._token, _CLIENT, self.opening, nonce, digest) + introduction


class ServerHandshake:
    def __init__(self, token: str) -> None:
        self.opening = b""
        self.num_bytes = NONCE_BYTES
        # The digest of the client's first frame, once the handshake is over.
        self.digest = b""
        self._token = token
        self._client_nonce = b""
        self._nonce = secrets.token_bytes(NONCE_BYTES)

    def take(self, data: bytes) -> bytes:
        if not self._client_nonce:
            self._client_nonce = data
            self.num_bytes = DIGEST_BYTES + DIGEST_BYTES
            return self._nonce + _proof(self._token, _SERVER, self._client_nonce, self._nonce)
        digest, proof = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        _check(proof, _proof(self._token, _CLIENT, self._client_nonce, self._nonce, digest))
        self.num_bytes, self.digest = 0, digest
        return b""


def digest_of(frame: bytes) -> bytes:
    return hashlib.sha256(frame).digest()


def _proof(token: str, end: bytes, client_nonce: bytes, server_nonce: bytes, digest: bytes = b"") -> bytes:
    # Each part has its fixed size, so no two different lists of parts are the same bytes.
    return hmac.digest(token.encode(), end + client_nonce + server_nonce + digest, hashlib.sha256)


def _check(proof: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(proof, expected):
        raise HandshakeError("it does not know this cluster's token")
