"""Small bodies prepared where they arrive: a real child process cannot run in virtual time."""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.gateway.generation.endpoint import Endpoint, Result
from alignedserve.gateway.generation.preparer import SMALL_BYTES, Preparer


class PreparerInPlace(Preparer):
    async def result(self, endpoint: Endpoint, body: Sequence[bytes], owner: str) -> Result:
        if sum(map(len, body)) > SMALL_BYTES:
            return await super().result(endpoint, body, owner)
        return endpoint.prepare(b"".join(body), self.model, self.limits, self.is_strict)
