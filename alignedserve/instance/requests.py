"""Converts between the router's messages about a request and the engine's objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import cast

from alignedserve.engine.outputs import BrokenLogits, TokenLogprobs, TokenOutput
from alignedserve.engine.request import NewRequest, Request
from alignedserve.instance.executor import Executor
from alignedserve.kv.held import Held
from alignedserve.kv.span import KvSpan
from alignedserve.protocol.messages import InstanceLimits, NewTokens, Work
from alignedserve.protocol.prompt_logprobs import TokenLogprobs as PlainLogprobs
from alignedserve.text.grammar import Matcher
from alignedserve.types import RequestId, RequestKey


def limits_of(engine: Executor, span: KvSpan) -> InstanceLimits:
    return InstanceLimits(
        num_blocks=engine.limits.num_blocks,
        block_size=engine.format.block_size,
        max_num_seqs=engine.limits.max_num_seqs,
        max_num_batched_tokens=engine.limits.max_num_batched_tokens,
        max_model_len=engine.max_model_len,
        block_bytes=engine.format.block_bytes,
        max_prefill_chunk=engine.limits.max_prefill_chunk,
        max_restored_blocks=engine.limits.max_restored_blocks,
        window=span.window,
        num_full_groups=span.num_full_groups,
        num_sliding_groups=span.num_sliding_groups,
        tile_tokens=span.tile_tokens,
        has_state=span.has_state,
    )


def adopt(
    engine: Executor,
    work: Work,
    held: Held,
    matcher: Matcher | None = None,
    num_shared: int = 0,
) -> Request:
    """Makes the engine's request, which has these blocks. `num_shared` is the number of tokens with shared KV."""
    wanted, params = work.request, work.request.params
    if work.output and params.prompt_logprobs is not None:
        # The log-probabilities of the prompt were sent with the first token.
        params = replace(params, prompt_logprobs=None)
    if matcher is None and params.structured_outputs is not None:
        matcher = engine.grammars.matcher(params.structured_outputs, wanted.owner)
    new = NewRequest(
        id_of(wanted.key),
        wanted.prompt,
        params,
        wanted.seed,
        work.output,
        max(work.num_cached, num_shared),
        matcher,
        wanted.pooling,
        wanted.adapter,
        held,
    )
    return engine.adopt(new)


def id_of(key: RequestKey) -> RequestId:
    return RequestId(str(key))


# Called for each token; `int` itself takes half as long as a function that calls it.
key_of = cast("Callable[[RequestId], RequestKey]", int)


def coming_news(requests: Iterable[Request]) -> list[NewTokens]:
    """Returns reports for tokens that are not known yet. `complete` fills them in."""
    return [NewTokens(key_of(each.request_id), len(each.output), []) for each in requests]


def complete(news: NewTokens, output: TokenOutput) -> None:
    if output.token_id is not None:
        news.tokens.append(output.token_id)
    if output.logprobs or output.finish_reason:
        news.logprobs = logprobs_of(output)
        news.finish_reason, news.stop_reason = output.finish_reason, output.stop_reason
        news.error = None if output.error is None else str(output.error)
        news.is_spoilt = isinstance(output.error, BrokenLogits)
        news.embedding = output.embedding


def logprobs_of(output: TokenOutput) -> list[PlainLogprobs]:
    return [] if output.logprobs is None else [plain(output.logprobs)]


def plain(found: TokenLogprobs) -> PlainLogprobs:
    likeliest = dict(zip(found.token_ids[1:], found.logprobs[1:], strict=True))
    return found.logprobs[0], found.ranks[0], likeliest
