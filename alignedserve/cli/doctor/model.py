"""Checks of the model's files: architecture, weights, adapters and tokenizer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from alignedserve.cli.doctor.case import Case
from alignedserve.cli.doctor.finding import Finding, fail, in_bytes, note, ok, warn
from alignedserve.gateway.endpoints import MODULE as PREPARING
from alignedserve.gateway.generation.preparer import Preparer
from alignedserve.gateway.limits.limits import CallLimits
from alignedserve.gateway.model.served_model import ServedModel
from alignedserve.models import listed_weights, lora
from alignedserve.models.locate import NotInCache
from alignedserve.models.source import open_checkpoint
from alignedserve.ops.shard import Shard
from alignedserve.text.tokenizer import Tokenizer


def check_model(case: Case) -> Iterator[Finding]:
    if isinstance(case.located, NotInCache):
        yield note(f"{case.located}: serve will download it from the hub")
        return
    if isinstance(case.located, ValueError):
        raise case.located
    config = case.model.config
    text = f"{case.model.name}: {config.architecture}, {config.num_layers} layers of {config.hidden_size}"
    yield ok(f"{text}, {case.max_model_len} of at most {config.max_position} tokens")


def num_weight_bytes(case: Case, with_adapters: bool = True) -> int:
    """Returns the bytes of an instance's weights in memory, summed over its ranks.

    Raises ValueError if the files do not contain the model or an adapter.
    """
    found, checkpoint = case.model, None
    if not found.is_dummy and found.directory is not None:
        checkpoint = open_checkpoint(found.directory, case.torch_dtype, "cpu", found.config.quantised)
    engine = case.engine
    num_ranks = engine.tensor_parallel_size
    # No rank holds more than the first.
    return num_ranks * listed_weights.num_weight_bytes(
        found.config,
        case.torch_dtype,
        checkpoint,
        engine.quantization,
        Shard(0, num_ranks),
        engine.adapters if with_adapters else (),
        engine.max_lora_rank,
        engine.num_adapter_places if with_adapters else 0,
        case.is_cpu,
    )


def check_weights(case: Case) -> Iterator[Finding]:
    try:
        size = in_bytes(num_weight_bytes(case, with_adapters=False))
    except ValueError as error:
        if not case.model.is_cached:
            raise
        yield warn(str(error), "serve will download missing files; remove damaged ones from the hub's cache")
        return
    stored = case.model.config.dtype
    cast = "" if stored == case.dtype else f" (the checkpoint says {stored})"
    what = "random" if case.model.is_dummy else "complete"
    num_ranks = case.engine.tensor_parallel_size
    ranks = f", on {num_ranks} ranks" if num_ranks > 1 else ""
    yield ok(f"{what}, {size} in {case.dtype}{_quantised(case)}{cast}{ranks}")


def _quantised(case: Case) -> str:
    stored = case.model.config.quantised
    if stored and stored.kind == "mxfp4":
        # Only gpt-oss. Its other weights are in floating point.
        return ", experts in mxfp4"
    if stored:
        return f", linear layers in {stored.kind} ({stored.method})"
    return f", linear layers in {case.engine.quantization}" if case.engine.quantization else ""


def check_adapters(case: Case) -> Iterator[Finding]:
    engine, config = case.engine, case.model.config
    if not engine.adapters:
        return
    listed_weights.check_adapters(config, engine.adapters, engine.max_lora_rank)
    yield ok(f"{engine.adapter_names}: each fits the model")
    for text in lora.other_bases(case.model.name, engine.adapters):
        yield warn(text, "ignore it if both names are the same model")


async def _try_out(model: ServedModel) -> None:
    """Raises ValueError if the tokenizer or chat template is too slow on a few words."""
    async with contextlib.aclosing(Preparer(model, CallLimits(), PREPARING)) as preparer:
        await preparer.start()


def check_tokenizer(case: Case) -> Iterator[Finding]:
    directory = case.engine.tokenizer or case.model.directory
    if case.engine.skip_tokenizer_init or directory is None:
        yield note("no tokenizer: requests and answers are token ids")
        return
    tokenizer, rows = Tokenizer.from_directory(directory), case.model.config.vocab_size
    try:
        asyncio.run(_try_out(ServedModel.located(case.model.name, case.model, case.engine)))
    except OSError as error:
        # Includes TimeoutError, on a machine that is too busy.
        yield fail(f"not tried: {error}", "try again on a machine with free CPU time and memory")
        return
    if tokenizer.vocab_size > rows:
        yield fail(
            f"{tokenizer.vocab_size} tokens, but the model has {rows}",
            "use the model's own tokenizer",
        )
    elif tokenizer.has_chat_template:
        yield ok(f"{tokenizer.vocab_size} tokens, with a chat template")
    else:
        yield warn(
            f"{tokenizer.vocab_size} tokens but no chat template: /v1/chat/completions refuses all requests",
            "use /v1/completions, or put a chat_template.jinja beside it",
        )
