"""Prepares small bodies in place, because a real child process can't run in virtual time."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from alignedserve.gateway.generation.endpoint import Beside, Endpoint, Result
from alignedserve.gateway.generation.preparer import SMALL_BYTES, Preparer
from alignedserve.gateway.http.json_pieces import Piece


class PreparerInPlace(Preparer):
    async def made(
        self,
        endpoint: Endpoint,
        body: Sequence[bytes],
        owner: str,
        earlier: Sequence[Piece] | None,
        num_bytes: int,
        num_added: int = 0,
        is_best_effort: bool = False,
    ) -> Result:
        if num_bytes + num_added > SMALL_BYTES:
            return await super().made(endpoint, body, owner, earlier, num_bytes, num_added, is_best_effort)
        beside = Beside(None if earlier is None else b"".join(earlier), SMALL_BYTES - num_bytes)
        # (Encoded as a child process would send it, so that unencodable bodies are refused.)
        made = endpoint.prepare_encoded(b"".join(body), self.model, self.limits, self.is_strict, beside)
        return msgspec.msgpack.decode(made, type=endpoint.made)
