"""The state of an instance's prompts, except for their blocks, until the first token is sent.

A prompt is checked and its grammar is compiled before the schedule gets it. Prompts with the same prefix share KV
(`prefix_cache.py`). The log-probabilities of a prompt are collected chunk by chunk and sent with its first token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from alignedserve.engine.outputs import BrokenLogits, TokenLogprobs, TokenOutput
from alignedserve.engine.request import Request, check_request
from alignedserve.instance.compiling import Compiling
from alignedserve.instance.executor import Executor
from alignedserve.instance.prefix_cache import HashedPrefix, PrefixCache
from alignedserve.instance.requests import adopt, complete, key_of, plain
from alignedserve.kv.held import Held
from alignedserve.protocol.messages import NewTokens, Work
from alignedserve.protocol.prompt_logprobs import pack
from alignedserve.text.grammar import Matcher
from alignedserve.types import InvalidRequest, RequestKey


class Prompts:
    def __init__(self, engine: Executor, compiling: Compiling, prefix_cache: PrefixCache) -> None:
        self._engine = engine
        self._compiling = compiling
        self.prefix_cache = prefix_cache
        # Grammars of prompts that have not started yet.
        self._matchers: dict[RequestKey, Matcher] = {}
        # Block hashes and counts of started prompts, until they leave.
        self._prefixes: dict[RequestKey, HashedPrefix] = {}
        # Log-probabilities so far, also of prompts that were preempted and wait again.
        self._logprobs: dict[RequestKey, list[TokenLogprobs]] = {}
        # Started prompts that have not yielded a token here yet.
        self._computing: set[RequestKey] = set()

    def __len__(self) -> int:
        return len(self._matchers) + len(self._prefixes)

    @property
    def are_computed(self) -> bool:
        return bool(self._computing)

    # ---- prompts that have not started -------------------------------------------------------------------------------

    def prepare(self, work: Work, then: Callable[[], None]) -> NewTokens | None:
        """Calls `then` when the prompt may start. If it can't be run, returns the report that says so."""
        wanted, engine = work.request, self._engine
        try:
            check_request(
                wanted.prompt, wanted.params, engine.vocabulary, engine.max_model_len, wanted.pooling
            )
        except InvalidRequest as error:
            return NewTokens(wanted.key, len(work.output), [], finish_reason="error", error=str(error))
        if (structure := wanted.params.structured_outputs) is not None:
            matcher = self._matchers[wanted.key] = engine.grammars.matcher(structure, wanted.owner)
            self._compiling.begin(wanted.key, matcher)
        self._compiling.when_ready(wanted.key, then)
        return None

    def forget(self, key: RequestKey) -> None:
        """Forgets a request that will not start. Safe to repeat."""
        self._compiling.drop(key)
        self._matchers.pop(key, None)
        self._logprobs.pop(key, None)
        self.prefix_cache.forget(key)

    def forget_waiting(self) -> None:
        for key in [*self._matchers, *(self._logprobs.keys() - self._prefixes.keys())]:
            self.forget(key)
        self.prefix_cache.forget_waiting()

    # ---- prompts that have started -----------------------------------------------------------------------------------

    def start(self, work: Work, held: Held) -> Request:
        """Starts the prompt and returns the engine's request."""
        key = work.request.key
        prefix = self._prefixes[key] = self.prefix_cache.start(work, held)
        matcher = self._matchers.pop(key, None)
        request = adopt(self._engine, work, held, matcher, prefix.num_shared)
        self._computing.add(key)
        if request.params.prompt_logprobs is not None:
            self._logprobs.setdefault(key, [])
        return request

    def num_found(self, key: RequestKey) -> int:
        """Returns the number of the prompt's tokens with KV from earlier prompts, here or from the pool."""
        prefix = self._prefixes.get(key)
        return prefix.num_found if prefix else 0

    def num_shared(self, key: RequestKey) -> int:
        """Returns the number of the prompt's tokens with KV that was on this instance when it started."""
        prefix = self._prefixes.get(key)
        return prefix.num_shared if prefix else 0

    def computed(self, requests: Iterable[Request]) -> None:
        """Shares the blocks with KV that each request has computed, or got from elsewhere, since the last call."""
        for request in requests:
            if prefix := self._prefixes.get(key_of(request.request_id)):
                self.prefix_cache.computed(request, prefix)

    def take_output(self, output: TokenOutput, news: NewTokens | None) -> None:
        """Takes a request's output of one iteration, and completes the report of its token. An output without a report
        only has log-probabilities of the prompt."""
        key = key_of(output.request_id)
        if output.prompt_logprobs and key in self._logprobs:
            self._logprobs[key] += output.prompt_logprobs
        self.failed(output)
        if news is None:
            return
        complete(news, output)
        self._computing.discard(key)
        prefix = self._prefixes.get(key)
        if prefix and not news.first:
            news.num_reused = prefix.num_found
            if (logprobs := self._logprobs.pop(key, None)) is not None:
                news.prompt_logprobs = pack([*map(plain, logprobs)])

    def failed(self, output: TokenOutput) -> None:
        """Stops sharing all blocks if the output says that the request's KV may be wrong, and the request shares any.
        The router's ForgetAll follows."""
        prefix = self._prefixes.get(key_of(output.request_id))
        if prefix and prefix.hasher and isinstance(output.error, BrokenLogits):
            prefix.leave_alone()
            self.prefix_cache.forget_blocks()

    def distrust_all(self, era: int) -> None:
        """Stops sharing all blocks, and those of requests of earlier eras."""
        for prefix in self._prefixes.values():
            prefix.leave_alone()
        self.prefix_cache.forget_all(era)

    def arriving(self, work: Work, held: Held) -> tuple[int, Matcher | None]:
        """Registers an admitted request with KV on its way. Returns the number of its tokens that need no copy, and its
        grammar if it was prepared."""
        key, num_here = work.request.key, 0
        if self.prefix_cache.is_enabled:
            prefix = self._prefixes[key] = self.prefix_cache.start(work, held)
            num_here = prefix.num_here
        if work.is_first:
            self._computing.add(key)
        return num_here, self._matchers.pop(key, None)

    def ended(self, request: Request) -> None:
        """Shares the KV of a request that has completed, or is about to leave."""
        if prefix := self._prefixes.get(key_of(request.request_id)):
            self.prefix_cache.ended(request, prefix)

    def preempted(self, request: Request) -> None:
        """Keeps the grammar and the log-probabilities of a prompt that waits again."""
        key = key_of(request.request_id)
        if request.matcher is not None:
            self._matchers[key] = request.matcher
        self._computing.discard(key)
        del self._prefixes[key]

    def left(self, key: RequestKey) -> None:
        """Forgets a request that holds no blocks any more. Safe to repeat."""
        self._computing.discard(key)
        self._prefixes.pop(key, None)
        self._logprobs.pop(key, None)
