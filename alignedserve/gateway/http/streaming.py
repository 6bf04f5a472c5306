"""An answer that is sent piece by piece, as long as its client is there."""

from __future__ import annotations

import asyncio

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send


class Stream(StreamingResponse):
    """Starlette's ends a stream by a group of tasks whose exceptions and frames refer to each other. When a thousand
    clients hung up, Python's collector of such circles found 200,000 objects at once, and held everything up for
    0.4 s."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self.stream_response(send))
        watching = asyncio.ensure_future(self.listen_for_disconnect(receive))
        try:
            await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
            (sending if sending.done() else watching).result()
        finally:
            sending.cancel()
            watching.cancel()
            # Whatever the pieces come from has let go of what it holds when this returns.
            await asyncio.wait({sending, watching})
