"""Debug log lines about messages, in each process, with the id of the HTTP call where it is known.

The lines contain nothing of a prompt, an output or a setting. Tokens are logged when they are a request's first or
last.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from alignedserve.protocol.messages import (
    Abort,
    Candidates,
    Commit,
    DecodeReport,
    Evict,
    Failed,
    Gone,
    MakeSpare,
    Message,
    NewTokens,
    Offer,
    Prefill,
    PrefillReport,
    Rejected,
    Release,
    Request,
    Reserve,
    Reserved,
    Stage,
    Submit,
    Tokens,
    Unstage,
)
from alignedserve.types import RequestKey

# A request and the id of its HTTP call; "" if the message does not have it.
About = tuple[RequestKey, str]


def log_message(logger: logging.Logger, verb: str, name: str, message: Message) -> None:
    """Writes a log line for each request of the message. `verb` is "to" or "from"; `name` is the other process's
    name."""
    if not logger.isEnabledFor(logging.DEBUG):
        return
    kind = type(message).__name__
    for key, request_id in about(message):
        fields = {"key": key} | ({"request_id": request_id} if request_id else {})
        logger.debug("%s %s %s", kind, verb, name, extra={"fields": fields})


def about(message: Message) -> Iterator[About]:
    match message:
        case Submit(request=request):
            yield _named(request)
        case Prefill(works=works) | Stage(works=works) | Offer(works=works):
            yield from (_named(work.request) for work in works)
        case Reserve(key=key, request_id=request_id):
            yield key, request_id
        case Abort(key=key) | Reserved(key=key) | Commit(key=key) | Evict(key=key):
            yield key, ""
        case Failed(key=key) | Rejected(key=key):
            yield key, ""
        case Gone(keys=keys) | MakeSpare(keys=keys) | Release(keys=keys):
            yield from _unnamed(keys)
        case Unstage(keys=keys) | Candidates(keys=keys):
            yield from _unnamed(keys)
        case Tokens(news=news):
            yield from _unnamed(_turns(news))
        case PrefillReport() as report:
            yield from _unnamed([*_turns(report.news), *(key for key, _ in report.saved), *report.staged])
        case DecodeReport() as report:
            evicted = (key for key, _ in report.evicted)
            yield from _unnamed([*report.admitted, *_turns(report.news), *evicted, *report.dropped])


def _named(request: Request) -> About:
    return request.key, request.request_id


def _unnamed(keys: Iterable[RequestKey]) -> Iterator[About]:
    return ((key, "") for key in keys)


def _turns(news: Iterable[NewTokens]) -> Iterator[RequestKey]:
    return (each.key for each in news if not each.first or each.finish_reason)
