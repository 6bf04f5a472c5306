"""Checks of a client's answer: even if incomplete, it must be the beginning of the right answer to its question."""

from __future__ import annotations

import json
from typing import Any

from alignedserve.protocol.sse import EventReader
from alignedserve.vopr.failures import Broken
from alignedserve.vopr.front_end.words import Question


class StreamedAnswer:
    """A stream of events, which ends once."""

    def __init__(self, question: Question, is_chat: bool) -> None:
        self.num_events = 0
        self._text, self._reason = question.answer
        self._is_chat = is_chat
        self._events = EventReader()
        self._so_far = ""
        self._ends: list[str] = []
        self._error: Any = None

    @property
    def num_words(self) -> int:
        return len(self._so_far.split())

    def feed(self, data: bytes) -> None:
        for event in self._events.feed(data):
            self.num_events += 1
            if "[DONE]" in self._ends:
                raise Broken(f"a stream goes on after its end ({event!r})")
            self._take(event)

    def close(self) -> bool:
        """Ends a complete stream. Returns whether the answer is whole: the stream may have ended with an error."""
        if self._ends[-1:] != ["[DONE]"]:
            raise Broken(f"a stream ends without [DONE] ({self._ends})")
        if self._error:
            return False
        if self._so_far != self._text or self._ends != [self._reason, "[DONE]"]:
            raise Broken(
                f"a stream has ended too soon ({self._so_far!r}, {self._ends}; must be {self._text!r})"
            )
        return True

    def _take(self, event: bytes) -> None:
        if event == b"[DONE]":
            self._ends.append("[DONE]")
            return
        body = json.loads(event)
        if "error" in body:
            self._error = body["error"]
            return
        choice = body["choices"][0]
        self._so_far += choice["delta"].get("content", "") if self._is_chat else choice["text"]
        if not self._text.startswith(self._so_far):
            raise Broken(f"a stream says something else ({self._so_far!r}, must be {self._text!r})")
        if choice["finish_reason"]:
            self._ends.append(choice["finish_reason"])


def check_whole(body: Any, question: Question, is_chat: bool) -> None:
    """Checks an answer that was not streamed."""
    choice = body["choices"][0]
    text = choice["message"]["content"] if is_chat else choice["text"]
    if (text, choice["finish_reason"]) != question.answer:
        raise Broken(f"an answer is wrong ({text!r}, {choice['finish_reason']}; must be {question.answer})")
    usage = body["usage"]
    if (usage["prompt_tokens"], usage["completion_tokens"]) != (question.num_words, question.num_tokens):
        raise Broken(f"an answer counts wrongly ({usage}; {question.num_words}, {question.num_tokens})")
