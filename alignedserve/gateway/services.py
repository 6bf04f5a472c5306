"""What works on stored things while a gateway serves: batch jobs, background responses and webhooks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping

from fastapi import APIRouter

from alignedserve.batch.job_run import JobHooks
from alignedserve.batch.placed_inputs import PlacedInputs
from alignedserve.batch.runner import BatchRunner
from alignedserve.gateway.anthropic.batches import message_batch_routes
from alignedserve.gateway.config import GatewayConfig
from alignedserve.gateway.endpoints import ENDPOINTS, IN_BATCHES
from alignedserve.gateway.generation.responding import LineAnswers, RequestBuilder
from alignedserve.gateway.http.reading import BodyMemory
from alignedserve.gateway.openai.batch_jobs.files import file_routes
from alignedserve.gateway.openai.batch_jobs.routes import batch_routes
from alignedserve.gateway.openai.responses.background import BackgroundResponses
from alignedserve.gateway.openai.responses.routes import RESPONSES, response_routes
from alignedserve.gateway.telemetry.metrics import Metrics
from alignedserve.gateway.webhooks.deliverer import Deliverer
from alignedserve.gateway.webhooks.events import Events
from alignedserve.protocol.messages import GatewayNews
from alignedserve.store import ContentsInStore, DeliveryStore, JobRecord, ResponseStore, Store
from alignedserve.store.contents import ContentsApart
from alignedserve.store.homes import WatchedHome


class StoreServices:
    """Batch jobs, background responses and webhooks. Without a store, none of them runs."""

    def __init__(self, config: GatewayConfig, metrics: Metrics) -> None:
        self._config = config
        self._metrics = metrics
        # This gateway's name as a holder of leases. The pid alone is ambiguous: gateways in different containers may
        # have the same name and the same pid.
        self.holder = f"{config.instance_id}-{os.getpid()}-{secrets.token_hex(4)}"
        self._events = Events(config.webhooks.url)
        # The runner of batch jobs, and its task.
        self._runner: tuple[BatchRunner, asyncio.Task[None]] | None = None
        self._background: BackgroundResponses | None = None

    @contextlib.asynccontextmanager
    async def running(
        self,
        request_builder: RequestBuilder,
        store: Store | None,
        home: WatchedHome | None,
        memory: BodyMemory,
    ) -> AsyncIterator[list[APIRouter]]:
        """Runs them while the block runs. Yields their routes. `home` has the contents of files; None: the store has
        them."""
        if store is None:
            yield [response_routes(request_builder)]
            return
        async with contextlib.AsyncExitStack() as stack:
            routers = self._start_batches(stack, request_builder, store, home)
            routers.append(self._start_responses(stack, request_builder, store.responses, memory))
            self._start_webhooks(stack, store.deliveries)
            yield routers

    def _start_batches(
        self,
        stack: contextlib.AsyncExitStack,
        request_builder: RequestBuilder,
        store: Store,
        home: WatchedHome | None,
    ) -> list[APIRouter]:
        config = self._config
        contents = ContentsApart(store, home) if home else ContentsInStore(store)
        runner = BatchRunner(
            store,
            LineAnswers(request_builder, ENDPOINTS).ask,
            request_builder.model.names,
            self.holder,
            config.batches,
            JobHooks(self._metrics.line_was_late, self._job_was_over, self._events.of_job),
            contents,
        )
        self._runner = runner, _start(stack, runner.run(), lambda: runner.stop(0))
        max_bytes, is_shared = config.limits.max_file_bytes, config.http.shared_files
        return [
            file_routes(store, contents, max_bytes, is_shared),
            batch_routes(
                store,
                runner,
                IN_BATCHES,
                request_builder,
                PlacedInputs(config.batches.inputs_from, max_bytes),
                is_shared,
                config.webhooks.allowed_urls,
            ),
            message_batch_routes(store, contents, runner, request_builder, max_bytes, is_shared),
        ]

    def _job_was_over(self, job: JobRecord) -> None:
        if over_at := job.completed_at or job.expired_at:
            self._metrics.job_was_over(job.created_at, over_at, job.expires_at - job.created_at)

    def _start_responses(
        self,
        stack: contextlib.AsyncExitStack,
        request_builder: RequestBuilder,
        store: ResponseStore | None,
        memory: BodyMemory,
    ) -> APIRouter:
        if store is None:
            return response_routes(request_builder)
        self._background = background = BackgroundResponses(
            store,
            request_builder,
            RESPONSES,
            self.holder,
            memory,
            self._config.batches,
            self._events.of_response,
        )
        _start(stack, background.run(), background.stop)
        return response_routes(request_builder, store, background)

    def _start_webhooks(self, stack: contextlib.AsyncExitStack, store: DeliveryStore | None) -> None:
        config = self._config
        if store is not None and config.webhooks.is_used:
            deliverer = Deliverer(
                store,
                config.webhooks,
                config.webhook_secrets,
                self._metrics.webhooks,
                self.holder,
            )
            _start(stack, deliverer.run(), deliverer.stop)

    # ---- while they run ----

    @property
    def num_open_jobs(self) -> Mapping[str, int]:
        """The number of open batch jobs, by status."""
        return self._runner[0].num_open_jobs if self._runner else {}

    @property
    def are_late(self) -> bool:
        """Whether batch jobs are expected to end too late."""
        return self._runner is not None and self._runner[0].forecast.are_late

    def estimates(self) -> dict[str, tuple[float | None, float]]:
        """Returns when this gateway's jobs will be done, for the other gateways."""
        return self._runner[0].forecast.said() if self._runner else {}

    def hear(self, news: GatewayNews) -> None:
        """Called with the news of another gateway."""
        if self._runner:
            self._runner[0].forecast.hear(news.gateway, news.estimates)

    async def end_lines(self, patience_s: float) -> None:
        """Begins no more batch lines. Returns when the running ones have ended, for which they have `patience_s`
        seconds."""
        if self._runner:
            runner, running = self._runner
            runner.stop(patience_s)
            await asyncio.wait({running})

    async def leave_responses(self) -> None:
        """Begins no more background responses. Returns when the running ones have ended."""
        if self._background:
            await self._background.leave()


def _start(
    stack: contextlib.AsyncExitStack, run: Coroutine[None, None, None], stop: Callable[[], None]
) -> asyncio.Task[None]:
    """Starts a service, which is stopped when the stack is closed."""
    running = asyncio.create_task(run)

    async def end() -> None:
        stop()
        await running

    stack.push_async_callback(end)
    return running
