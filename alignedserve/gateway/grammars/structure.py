"""Checks a request's structured output, and compiles it within a time limit, before the request is submitted."""

from __future__ import annotations

from alignedserve.gateway.grammars.compiler import Compiler, QueueTimeout
from alignedserve.gateway.http.errors import ApiError, unavailable
from alignedserve.gateway.limits.limits import Limits
from alignedserve.sampling_params import SamplingParams
from alignedserve.types import InvalidRequest


def check_size(limits: Limits, params: SamplingParams, name: str) -> None:
    """Checks the size of the schema or grammar, which is the value of the parameter `name`. Raises ApiError."""
    num_bytes = len(params.structured_outputs.text) if params.structured_outputs else 0
    if num_bytes > limits.max_grammar_bytes:
        raise _refused(name, f"{num_bytes} bytes; at most {limits.max_grammar_bytes} are allowed")


async def check_structure(
    compiler: Compiler, limits: Limits, params: SamplingParams, name: str, owner: str
) -> None:
    """Compiles the schema or grammar, which is the value of the parameter `name`. `owner` is the owner of the request's
    API key. Raises ApiError with its error."""
    wanted = params.structured_outputs
    if wanted is None:
        return
    try:
        await compiler.check(wanted, limits.grammar_timeout_s, owner)
    except QueueTimeout:
        raise unavailable(f"{name}: schemas and grammars of other API keys are being compiled") from None
    except TimeoutError:
        raise _refused(name, f"not compiled within {limits.grammar_timeout_s:g} s") from None
    except InvalidRequest as error:
        # The client knows the parameter by another name.
        raise _refused(name, str(error).partition(": ")[2]) from error


def _refused(name: str, reason: str) -> ApiError:
    return ApiError(400, f"{name}: {reason}", param=name)
