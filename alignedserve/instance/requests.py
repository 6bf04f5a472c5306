"""Between the router's words for a request and the engine's."""

from __future__ import annotations

from alignedserve.engine.engine import Engine, TokenOutput
from alignedserve.engine.request import Request
from alignedserve.messages import InstanceLimits, NewTokens, Work
from alignedserve.types import RequestId, RequestKey


def limits_of(engine: Engine) -> InstanceLimits:
    return InstanceLimits(
        num_blocks=engine.num_blocks,
        block_size=engine.cache.format.block_size,
        max_num_seqs=engine.limits.max_num_seqs,
        max_num_batched_tokens=engine.limits.max_num_batched_tokens,
        max_model_len=engine.max_model_len,
        block_bytes=engine.cache.format.block_bytes,
    )


def adopt(engine: Engine, work: Work) -> Request:
    """The schedule has found it room."""
    wanted = work.request
    request = engine.adopt(
        RequestId(str(wanted.key)), wanted.prompt, wanted.params, wanted.seed, work.output, work.num_cached
    )
    if request is None:
        num_tokens = len(wanted.prompt) + len(work.output)
        raise RuntimeError(
            f"request {wanted.key}: planned blocks for {num_tokens} tokens, only {engine.num_free_blocks} are free"
        )
    return request


def key_of(request_id: RequestId) -> RequestKey:
    return RequestKey(int(request_id))


def news_of(output: TokenOutput, request: Request) -> NewTokens:
    """`request` as it is after the token was appended."""
    num_before = len(request.output) - (output.token_id is not None)
    news = NewTokens(key_of(output.request_id), num_before, [])
    complete(news, output)
    return news


def coming_news(request: Request) -> NewTokens:
    """Of the next token, which is not known yet: `complete` follows."""
    return NewTokens(key_of(request.request_id), len(request.output), [])


def complete(news: NewTokens, output: TokenOutput) -> None:
    if output.token_id is not None:
        news.tokens.append(output.token_id)
    if output.logprobs or output.finish_reason:
        news.logprobs = logprobs_of(output)
        news.finish_reason, news.stop_reason = output.finish_reason, output.stop_reason
        news.error = None if output.error is None else str(output.error)


def logprobs_of(output: TokenOutput) -> list[tuple[float, int, dict[int, float]]]:
    found = output.logprobs
    if found is None:
        return []
    likeliest = dict(zip(found.token_ids[1:], found.logprobs[1:], strict=True))
    return [(found.logprobs[0], found.ranks[0], likeliest)]


def says_something(output: TokenOutput) -> bool:
    """Rather than prompt_logprobs alone, which nobody asks an instance for."""
    return output.token_id is not None or output.finish_reason is not None
