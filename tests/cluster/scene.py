"""Requests that are repeated while something happens to an island's processes, and their expected results."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from alignedserve.engine.lora_modules import parse_lora_modules
from alignedserve.protocol.messages import Request
from alignedserve.sampling_params import SamplingParams
from alignedserve.types import InstanceId
from tests.cluster.client import Client, Stream, all_ended, connected
from tests.cluster.history import History
from tests.cluster.processes import Processes
from tests.cluster.requests import alone, make_request, mixed_prompts, results
from tests.engine.helpers import greedy_params

NUM_REQUESTS = 16
# About this many output tokens per request have arrived when the first process is killed.
NUM_EARLY = 15


class Scene:
    """Processes, the requests that are sent to them repeatedly, and the expected results."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self._begun_s = time.monotonic()
        self._params = [
            greedy_params(200) if number % 2 else SamplingParams(seed=number, max_tokens=200, ignore_eos=True)
            for number in range(NUM_REQUESTS)
        ]
        self._prompts = [prompt[:150] for prompt in mixed_prompts(NUM_REQUESTS, seed=3)]
        setup = processes.setup
        # KV that was in an 8-bit pool is only nearly right.
        self._is_exact = setup.pool_kv_dtype == "auto"
        names = ["", *(module.name for module in parse_lora_modules(setup.lora_modules))]
        self._adapters = [names[number // 2 % len(names)] for number in range(NUM_REQUESTS)]
        self._expected = alone(setup.directory, self.requests(), setup.kv_cache_dtype, setup.lora_modules)

    def requests(self) -> list[Request]:
        each = zip(self._prompts, self._params, self._adapters, strict=True)
        return [make_request(*one) for one in each]

    def history(self) -> History:
        """Returns the history since this scene began, because earlier tests may have used the processes."""
        return History(self.processes.logs, self._begun_s)

    def check(self, streams: Sequence[Stream]) -> None:
        """Checks streams that have ended."""
        if self._is_exact:
            assert results(streams) == self._expected
        else:
            assert [len(stream.tokens) for stream in streams] == [len(each.tokens) for each in self._expected]
            assert {stream.finish_reason for stream in streams} == {"length"}

    def play(self, act: Callable[[Client, list[Stream]], Awaitable[None]]) -> None:
        """Awaits `act` when all requests have been submitted."""

        async def scenario() -> None:
            async with connected(self.processes) as client:
                streams = self._submit(client)
                await act(client, streams)
                await client.until(partial(all_ended, streams))
                for start in range(0, len(streams), NUM_REQUESTS):
                    self.check(streams[start : start + NUM_REQUESTS])

        asyncio.run(scenario())

    def kill_in_turn(self, victims: Sequence[InstanceId]) -> None:
        """Kills them in mid-stream, each after the first while the others recover. Each is restarted at once."""

        async def kill(client: Client, streams: list[Stream]) -> None:
            for victim in victims:
                await self.until_mid_stream(client, streams)
                self.processes.kill(victim)
                self.processes.start(victim)

        self.play(kill)

    def _submit(self, client: Client) -> list[Stream]:
        return [client.submit(request) for request in self.requests()]

    async def until_mid_stream(self, client: Client, streams: list[Stream]) -> None:
        """Submits everything again whenever it has ended before this was checked."""
        await self._until_early_or_ended(client, streams)
        while all_ended(streams):
            streams += self._submit(client)
            await self._until_early_or_ended(client, streams)

    async def _until_early_or_ended(self, client: Client, streams: list[Stream]) -> None:
        enough = client.num_tokens + NUM_EARLY * NUM_REQUESTS
        await client.until(lambda: client.num_tokens >= enough or all_ended(streams))
