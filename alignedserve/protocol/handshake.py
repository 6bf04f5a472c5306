"""Two processes prove to each other that they know the cluster's token, without sending it.

    client -> server   nonce                  32 bytes
    server -> client   nonce, proof           64 bytes
    client -> server   digest, proof          64 bytes; SHA-256 of the frame that comes next

A nonce is random. A proof is an HMAC-SHA256, keyed with the token, over the name of the proving end, both nonces and,
for the client, the digest. So a proof is valid for one connection, one direction and one first frame. The server proves
itself first: a process that listens in the router's place receives a random number and nothing else.

Every part has a fixed size. Before the proof, nothing is decoded and at most 64 bytes are awaited.
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
    """One end of the handshake, without its connection. It must not be used again after it has failed."""

    # The bytes that this end sends first, unasked.
    opening: bytes
    # Bytes that the other end has to send next. 0: the handshake is over, and the other end has proved itself.
    num_bytes: int

    def take(self, data: bytes) -> bytes:
        """Takes those bytes and returns the answer. Raises HandshakeError."""


class ClientHandshake:
    def __init__(self, token: str, introduce: Callable[[], bytes]) -> None:
        """`introduce` returns the first frame. It is sent with the last answer, once the server has proved itself."""
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
    # Each part has a fixed size, so different lists of parts never give the same bytes.
    return hmac.digest(token.encode(), end + client_nonce + server_nonce + digest, hashlib.sha256)


def _check(proof: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(proof, expected):
        raise HandshakeError("it does not know this cluster's token")
