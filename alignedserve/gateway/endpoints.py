"""All endpoints with a request body of their own, by path."""

from __future__ import annotations

from typing import Final

from alignedserve.gateway.anthropic.batch_bodies import MESSAGE_BATCHES
from alignedserve.gateway.anthropic.routes import COUNT_TOKENS, MESSAGES
from alignedserve.gateway.generation.endpoint import Endpoint
from alignedserve.gateway.generation.prepare_process import main
from alignedserve.gateway.openai.adapters import LOAD, UNLOAD
from alignedserve.gateway.openai.batch_jobs.bodies import BATCHES
from alignedserve.gateway.openai.completions import CHAT, COMPLETIONS
from alignedserve.gateway.openai.embeddings.routes import EMBEDDING_ENDPOINTS
from alignedserve.gateway.openai.responses.conversation_bodies import ADD_ITEMS, CREATE, UPDATE
from alignedserve.gateway.openai.responses.routes import COMPACT, INPUT_TOKENS, RESPONSES
from alignedserve.gateway.openai.tokens import DETOKENIZE, TOKENIZE
from alignedserve.gateway.tool_routes import INVOCATIONS

ENDPOINTS: Final[dict[str, Endpoint]] = {
    endpoint.path: endpoint
    for endpoint in (
        *(CHAT, COMPLETIONS, RESPONSES, INPUT_TOKENS, COMPACT, TOKENIZE, DETOKENIZE),
        *(CREATE, UPDATE, ADD_ITEMS, BATCHES),
        *(LOAD, UNLOAD),
        *(MESSAGES, COUNT_TOKENS, MESSAGE_BATCHES),
        *EMBEDDING_ENDPOINTS,
        INVOCATIONS,
    )
}
IN_BATCHES: Final = tuple(path for path, endpoint in ENDPOINTS.items() if endpoint.in_batches)


# The module that the gateway runs in the child process.
MODULE: Final = "alignedserve.gateway.endpoints"

if __name__ == "__main__":
    main(ENDPOINTS)
