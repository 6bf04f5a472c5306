"""Prompts before they start: they are checked, and their grammars are compiled beside the iterations."""

from __future__ import annotations

from collections.abc import Callable

from alignedserve.engine.validate import check_request
from alignedserve.instance.compiling import Compiling
from alignedserve.instance.executor import Executor
from alignedserve.protocol.messages import NewTokens, Work
from alignedserve.text.grammar import Matcher
from alignedserve.types import InvalidRequest, RequestKey


class Preparation:
    def __init__(self, engine: Executor, compiling: Compiling) -> None:
        self._engine = engine
        self._compiling = compiling
        # The grammars of prompts which have not started yet.
        self._matchers: dict[RequestKey, Matcher] = {}

    def __len__(self) -> int:
        return len(self._matchers)

    def refusal(self, work: Work) -> NewTokens | None:
        """The report of a prompt that can't be run; None if it can."""
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
        """Returns the prompt's grammar, and forgets it: the prompt starts."""
        return self._matchers.pop(key, None)

    def put_back(self, key: RequestKey, matcher: Matcher | None) -> None:
        """The prompt waits again."""
        if matcher is not None:
            self._matchers[key] = matcher

    def forget(self, key: RequestKey) -> None:
        """Forgets a prompt which will not start. Safe to repeat."""
        self._compiling.drop(key)
        self._matchers.pop(key, None)

    @property
    def keys(self) -> list[RequestKey]:
        return [*self._matchers]
