"""Prepares small bodies in place, because a real child process can't run in virtual time."""

from __future__ import annotations

import msgspec

from alignedserve.gateway.generation.endpoint import Beside, Result
from alignedserve.gateway.generation.preparer import SMALL_BYTES, Preparer, ReceivedBody


class PreparerInPlace(Preparer):
    async def made(self, body: ReceivedBody, num_added: int = 0) -> Result:
        if body.num_bytes + num_added > SMALL_BYTES:
            return await super().made(body, num_added)
        earlier = None if body.earlier is None else b"".join(body.earlier)
        beside = Beside(earlier, SMALL_BYTES - body.num_bytes)
        whole = b"".join(body.pieces)
        # (Encoded as a child process would send it, so that unencodable bodies are refused.)
        made = body.endpoint.prepare_encoded(whole, self.model, self.limits, self.is_strict, beside)
        return msgspec.msgpack.decode(made, type=body.endpoint.made)
