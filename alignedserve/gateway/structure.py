"""Schemas, regexes and grammars are compiled before a request goes on its way, off the event loop, and within a time.

Instances compile them again; what is refused here never gets there.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from alignedserve.gateway.errors import ApiError
from alignedserve.gateway.limits import Limits
from alignedserve.gateway.model import ServedModel
from alignedserve.sampling_params import SamplingParams
from alignedserve.types import InvalidRequest

# What takes too long goes on in its thread, until the compiler's own limits end it. Others wait for a thread meanwhile.
_compilers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="grammar")


async def check_structure(model: ServedModel, limits: Limits, params: SamplingParams, name: str) -> None:
    """`name`: of the parameter it came in. Raises ApiError that says what is wrong with it."""
    wanted = params.structured_outputs
    if wanted is None:
        return
    num_bytes = len(wanted.text)
    if num_bytes > limits.max_grammar_bytes:
        raise _refused(name, f"{num_bytes} bytes; at most {limits.max_grammar_bytes} are allowed")
    compiling = asyncio.get_running_loop().run_in_executor(_compilers, model.grammars.check, wanted)
    try:
        await asyncio.wait_for(compiling, limits.grammar_timeout_s)
    except TimeoutError:
        raise _refused(name, f"not compiled within {limits.grammar_timeout_s:g} s") from None
    except InvalidRequest as error:
        # to its author it has another name
        raise _refused(name, str(error).partition(": ")[2]) from error


def _refused(name: str, reason: str) -> ApiError:
    return ApiError(400, f"{name}: {reason}", param=name)
