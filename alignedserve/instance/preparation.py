"""Checks prompts before they start, and has their grammars compiled beside the iterations."""

from __future__ import annotations

from collections.abc import Callable

from alignedserve.engine.request import check_request
from alignedserve.instance.compiling import Compiling
from alignedserve.instance.executor import Executor
from alignedserve.protocol.messages import NewTokens, Work
from alignedserve.text.grammar import Matcher
from alignedserve.types import InvalidRequest, RequestKey


class Preparation:
    def __init__(self, engine: Executor, compiling: Compiling) -> None:
        self._engine = engine
        self._compiling = compiling
        # Grammars of prompts that have not started yet.
        self._matchers: dict[RequestKey, Matcher] = {}

    def __len__(self) -> int:
        return len(self._matchers)

    def refusal(self, work: Work) -> NewTokens | None:
        """Returns the report for a prompt that can't be run; None if it can."""
        wanted = work.request
        try:
            engine = self._engine
            check_request(
                wanted.prompt, wanted.params, engine.vocabulary, engine.max_model_len, wanted.pooling
            )
        except InvalidRequest as error:
            return NewTokens(wanted.key, len(work.output), [], finish_reason="error", error=str(error))
        return None

    def when_ready(self, work: Work, then: Callable[[], None]) -> None:
        key, structure = work.request.key, work.request.params.structured_outputs
        if structure is not None:
            matcher = self._matchers[key] = self._engine.grammars.matcher(structure)
            self._compiling.begin(key, matcher)
        self._compiling.when_ready(key, then)

    def take(self, key: RequestKey) -> Matcher | None:
        """Returns and forgets the grammar of a prompt that starts."""
        return self._matchers.pop(key, None)

    def put_back(self, key: RequestKey, matcher: Matcher | None) -> None:
        """Keeps the grammar of a prompt that waits again."""
        if matcher is not None:
            self._matchers[key] = matcher

    def forget(self, key: RequestKey) -> None:
        """Forgets a prompt that will not start. Safe to repeat."""
        self._compiling.drop(key)
        self._matchers.pop(key, None)

    @property
    def keys(self) -> list[RequestKey]:
        return [*self._matchers]
