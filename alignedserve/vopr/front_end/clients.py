"""Clients of the gateways, which know the right answers. Some chat, some have batch jobs.

A client retries a call that fails for a reason other than its own, possibly at another gateway, until it has its
answer. It waits as long as that takes: an earlier retry would hide a forgotten request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from alignedserve.types import RequestKey
from alignedserve.vopr.front_end.calls import Calls
from alignedserve.vopr.front_end.chats import Chat
from alignedserve.vopr.front_end.delivered import Delivered
from alignedserve.vopr.front_end.jobs import JobClient
from alignedserve.vopr.front_end.virtual_loop import VirtualLoop
from alignedserve.vopr.front_end.virtual_process import watched
from alignedserve.vopr.front_end.wanted import AwaitedAnswers
from alignedserve.vopr.front_end.words import Question
from alignedserve.vopr.history import Ask, SubmitJob

# More than the lines of any job.
_MAX_LINES = 1000


class GatewayClients:
    def __init__(
        self,
        loop: VirtualLoop,
        calls: Calls,
        wanted: AwaitedAnswers,
        delivered: Delivered,
        num_troubles: Callable[[], int],
        max_model_len: int,
    ) -> None:
        self.calls = calls
        self.num_open = self.num_tokens = 0
        # How clients' requests and jobs have ended.
        self.ends: Counter[str] = Counter()
        self._loop = loop
        self._wanted = wanted
        self._delivered = delivered
        self._num_troubles = num_troubles
        self._max_model_len = max_model_len

    def ask(self, ask: Ask) -> None:
        question = self._question(ask.key, 0, ask.prompt_len, ask.output_len)
        chat = Chat(ask, question, self.calls, self._wanted, self._delivered)
        self._start(chat.run(), ask.key, question.num_tokens)

    def batch(self, batch: SubmitJob) -> None:
        questions = [
            self._question(batch.key, 1 + index, batch.prompt_len, batch.output_len)
            for index in range(batch.num_lines)
        ]
        job = JobClient(batch, questions, self.calls, self._num_troubles)
        self._start(job.run(), batch.key, sum(each.num_tokens for each in questions))

    def _question(self, key: RequestKey, index: int, prompt_len: int, output_len: int) -> Question:
        """Returns a question. Lines of a job differ in length, too."""
        room = self._max_model_len - 1
        num_words = min(1 + (prompt_len + 7 * index) % room, room)
        return Question.of(key * _MAX_LINES + index, num_words, output_len + index % 5, self._max_model_len)

    def _start(self, life: Coroutine[Any, Any, str], key: RequestKey, num_tokens: int) -> None:
        self.num_open += 1
        watched(self._loop.create_task(self._live(life, num_tokens), name=f"client {key}"))

    async def _live(self, life: Coroutine[Any, Any, str], num_tokens: int) -> None:
        end = await life
        self.ends[end] += 1
        self.num_open -= 1
        if end in ("answered", "job completed"):
            self.num_tokens += num_tokens
