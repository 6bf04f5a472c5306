"""The application: its routes, and the middleware in front of them."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response

from alignedserve.gateway.anthropic.routes import message_routes
from alignedserve.gateway.endpoints import ENDPOINTS
from alignedserve.gateway.generation.responding import RequestBuilder
from alignedserve.gateway.http.access import Access, AuthLimitsMiddleware, require_counters
from alignedserve.gateway.http.description import describe
from alignedserve.gateway.http.errors import add_error_handlers
from alignedserve.gateway.http.json_pieces import Json
from alignedserve.gateway.http.keys import EXPIRED
from alignedserve.gateway.http.request_id import HEADER as REQUEST_ID
from alignedserve.gateway.openai.adapters import AdapterChanges, adapter_routes
from alignedserve.gateway.openai.completions import completion_routes
from alignedserve.gateway.openai.embeddings.routes import embedding_routes
from alignedserve.gateway.openai.models import model_routes
from alignedserve.gateway.openai.tokens import tokens_router
from alignedserve.gateway.page.routes import add_page
from alignedserve.gateway.telemetry.health import cluster_body, health
from alignedserve.gateway.telemetry.metrics import IGNORED_HEADER
from alignedserve.gateway.tool_routes import tool_routes
from alignedserve.store import Store
from alignedserve.store.homes import WatchedHome
from alignedserve.version import __version__

# The endpoints read these bodies themselves, so FastAPI can't describe them.
BODIES = tuple(endpoint.body for endpoint in ENDPOINTS.values())


def create_app(
    request_builder: RequestBuilder,
    access: Access,
    routers: Sequence[APIRouter] = (),
    allowed_origins: Sequence[str] = (),
    store: Store | None = None,
    home: WatchedHome | None = None,
    changes: AdapterChanges | None = None,
) -> FastAPI:
    """Returns the application. `routers` are added to the routes that always exist.

    Without a `store` there are no files and batches. Without a `home`, the store has the contents of files. Adapters
    are loaded by way of `changes`."""
    islands = request_builder.islands
    # FastAPI's documentation pages would load scripts from other sites, so they are off.
    app = FastAPI(
        title="AlignedServe",
        version=__version__,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    add_error_handlers(app)

    @app.get("/health", responses={503: {"description": "The server can't answer, and why"}})
    async def health_route() -> Response:
        if access.keys.are_expired:
            return JSONResponse({"status": "unavailable", "reason": EXPIRED}, 503)
        status, body = await health(islands.cluster, access.drain_state, store, home, islands.missing)
        return JSONResponse(body, status)

    # SageMaker's name of it.
    app.get("/ping")(health_route)
    public = {health_route, *add_page(app)}
    app.add_middleware(AuthLimitsMiddleware, router=app.router, public=public, access=access)
    if allowed_origins:
        # Outside of AuthLimitsMiddleware, because a browser's preflight request has no key, and because the browser
        # must be able to read a refusal.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=(REQUEST_ID, IGNORED_HEADER),
        )

    app.include_router(tokens_router(request_builder))
    app.include_router(completion_routes(request_builder))
    app.include_router(embedding_routes(request_builder))
    app.include_router(message_routes(request_builder))
    app.include_router(model_routes(request_builder.model))
    app.include_router(adapter_routes(request_builder, changes or AdapterChanges(request_builder.model)))
    app.include_router(tool_routes(request_builder, access.drain_state))

    @app.get("/v1/cluster")
    async def cluster(http: Request) -> Json:
        require_counters(http)
        return cluster_body(await islands.cluster())

    for router in routers:
        app.include_router(router)
    app.openapi = describe(app, BODIES)  # type: ignore[method-assign]
    return app
