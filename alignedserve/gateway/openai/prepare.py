"""Makes calls from valid bodies of OpenAI's completions and chats."""

from __future__ import annotations

from alignedserve.gateway.chat.prepare import chat_fields
from alignedserve.gateway.generation.checks import check_body, checked_prompts, fields_of
from alignedserve.gateway.grammars.structure import check_size
from alignedserve.gateway.limits.limits import Limits
from alignedserve.gateway.model.served_model import ServedModel
from alignedserve.gateway.openai.bodies import ChatBody, ChoicesBody, CompletionBody
from alignedserve.gateway.openai.choices_builder import Shown
from alignedserve.gateway.openai.prepared import PreparedChatCompletion, PreparedCompletion


def completion(body: CompletionBody, model: ServedModel, limits: Limits) -> PreparedCompletion:
    """Returns the call of a completion. Raises ApiError and InvalidRequest."""
    with body.naming():
        check_body(body, model, limits)
        params = body.sampling_params()
        limits.check(len(body.prompts), params)
        check_size(limits, params, body.structure_name)
        prompts = [model.prompt_ids(prompt) for prompt in body.prompts]
        params = checked_prompts(body, prompts, params, model, limits)
        return PreparedCompletion(
            **fields_of(body, prompts, params, body.structure_name, model),
            shown=_shown(body, body.logprobs),
            num_given=body.n or 1,
            echoes=[model.text_of("prompt", prompt) for prompt in prompts] if body.echo else None,
            gives_output=not body.is_only_echo,
            reports_progress=body.reports_progress,
        )


def chat(body: ChatBody, model: ServedModel, limits: Limits) -> PreparedChatCompletion:
    """Returns the call of a chat. Raises ApiError and InvalidRequest."""
    with body.naming():
        found = chat_fields(body, body.conversation(), model, limits)
        shown = _shown(body, found["params"].logprobs)
        return PreparedChatCompletion(**found, shown=shown, reports_progress=body.reports_progress)


def _shown(body: ChoicesBody, num_logprobs: int | None) -> Shown:
    return Shown(
        num_logprobs,
        body.prompt_logprobs,
        body.includes_usage,
        body.includes_usage_so_far,
        bool(body.return_token_ids),
    )
