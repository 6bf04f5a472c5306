"""Which requests are taken. A refusal has a reason for programs and a sentence for people."""

from __future__ import annotations

from alignedserve.messages import Request
from router.config import RouterConfig
from router.fleet import Fleet

Refusal = tuple[str, str]


def refuse(
    request: Request, fleet: Fleet, num_queued: int, num_queued_tokens: int, config: RouterConfig
) -> Refusal | None:
    if num_queued >= config.max_num_queued_reqs:
        return "full", f"{num_queued} requests wait already, at most {config.max_num_queued_reqs} may"
    if num_queued_tokens and num_queued_tokens + len(request.prompt) > config.max_num_queued_tokens:
        return (
            "full",
            f"{num_queued_tokens} tokens wait for prefill already, and with the {len(request.prompt)} of this "
            f"prompt there would be more than {config.max_num_queued_tokens}",
        )
    instances = [*fleet.prefills, *fleet.decodes]
    if not fleet.pool or not instances:
        return None
    limits = instances[0].hello.limits
    most_tokens = min(view.hello.limits.max_model_len for view in instances)
    num_prompt = len(request.prompt)
    if num_prompt >= most_tokens:
        return (
            "too_long",
            f"the prompt has {num_prompt} tokens, and prompt and output together at most {most_tokens}",
        )
    num_tokens = min(num_prompt + (request.params.max_tokens or most_tokens), most_tokens)
    needed = -(-num_tokens // limits.block_size)
    most = min(process.hello.limits.num_blocks for process in (fleet.pool, *instances))
    if needed > most:
        return (
            "too_long",
            f"prompt and output need {needed} blocks of KV, and there are at most {most} for a request",
        )
    return None
