"""The state of prompts on a colocated instance, except for their blocks, until the first token is sent.

A grammar is compiled before the schedule gets the prompt (`instance/preparation.py`). Prompts with the same prefix
share KV (`instance/prefix_cache.py`). The log-probabilities of a prompt are collected chunk by chunk and sent with its
first token.
"""

from __future__ import annotations

from collections.abc import Iterable

from alignedserve.engine.outputs import BrokenLogits, TokenLogprobs, TokenOutput
from alignedserve.engine.request import Request
from alignedserve.instance.compiling import Compiling
from alignedserve.instance.executor import Executor
from alignedserve.instance.prefix_cache import HashedPrefix, PrefixCache
from alignedserve.instance.preparation import Preparation
from alignedserve.instance.requests import adopt, key_of, plain
from alignedserve.protocol.messages import NewTokens, Work
from alignedserve.protocol.prompt_logprobs import pack
from alignedserve.types import RequestKey


class Prompts:
    def __init__(
        self, engine: Executor, compiling: Compiling, enable_prefix_caching: bool, shares_blocks: bool = False
    ) -> None:
        """`shares_blocks`: BE fills its blocks from the last slot down, and no other prompt uses its KV."""
        self._engine = engine
        self.preparation = Preparation(engine, compiling)
        self.prefix_cache = PrefixCache(engine, enable_prefix_caching, rt_only=shares_blocks)
        self._shares_blocks = shares_blocks
        # Block hashes and counts of started prompts, until they leave.
        self._prefixes: dict[RequestKey, HashedPrefix] = {}
        self._logprobs: dict[RequestKey, list[TokenLogprobs]] = {}
        # Started prompts that have not yielded a token here yet.
        self._computing: set[RequestKey] = set()

    def __len__(self) -> int:
        return len(self.preparation) + len(self._prefixes)

    @property
    def are_computed(self) -> bool:
        return bool(self._computing)

    def forget(self, key: RequestKey) -> None:
        """Forgets a request that will not start. Safe to repeat."""
        self.preparation.forget(key)
        self.prefix_cache.forget(key)

    def forget_waiting(self) -> None:
        for key in self.preparation.keys:
            self.forget(key)
        self.prefix_cache.forget_waiting()

    # ---- prompts that have started -----------------------------------------------------------------------------------

    def start(self, work: Work, num_lent: int = 0, keeps_inputs: bool = False) -> Request:
        """Starts the prompt and returns the engine's request. `num_lent` and `keeps_inputs`: see `Engine.adopt`."""
        key = work.request.key
        prefix = self._prefixes[key] = self.prefix_cache.start(work, is_shared=not keeps_inputs)
        matcher, is_reversed = self.preparation.take(key), self.is_reversed(work)
        request = adopt(self._engine, work, matcher, prefix.num_found, is_reversed, num_lent, keeps_inputs)
        self._computing.add(key)
        if request.params.prompt_logprobs is not None:
            self._logprobs[key] = []
        return request

    def is_reversed(self, work: Work) -> bool:
        return self._shares_blocks and not work.deadlines.is_rt

    def num_found(self, key: RequestKey) -> int:
        """Returns the number of the prompt's tokens with KV from earlier prompts."""
        prefix = self._prefixes.get(key)
        return prefix.num_found if prefix else 0

    def computed(self, requests: Iterable[Request]) -> None:
        """Shares the blocks that each request has computed since the last call."""
        for request in requests:
            if prefix := self._prefixes.get(key_of(request.request_id)):
                self.prefix_cache.computed(request, prefix)

    def take_output(self, output: TokenOutput, news: NewTokens | None) -> None:
        """Takes a request's output of one iteration, and the report of its token if it yielded one."""
        key = key_of(output.request_id)
        if output.prompt_logprobs and key in self._logprobs:
            self._logprobs[key] += output.prompt_logprobs
        prefix = self._prefixes.get(key)
        if output.error and prefix and isinstance(output.error, BrokenLogits):
            self.prefix_cache.spoilt(prefix)
        if news is None:
            return
        self._computing.discard(key)
        if prefix and not news.first:
            news.num_reused = prefix.num_found
            if (logprobs := self._logprobs.pop(key, None)) is not None:
                news.prompt_logprobs = pack([*map(plain, logprobs)])

    def resumed(self, work: Work, request: Request) -> None:
        """Registers a request after its KV was pulled from the pool."""
        if self.prefix_cache.is_enabled:
            prefix = self._prefixes[work.request.key] = self.prefix_cache.start(work)
            self.prefix_cache.computed(request, prefix)

    def ended(self, request: Request) -> None:
        """Shares the KV of a request that has completed."""
        if prefix := self._prefixes.get(key_of(request.request_id)):
            self.prefix_cache.ended(request, prefix)

    def left(self, key: RequestKey) -> None:
        """Forgets a request that holds no blocks any more. Safe to repeat."""
        self._computing.discard(key)
        self._prefixes.pop(key, None)
        self._logprobs.pop(key, None)
