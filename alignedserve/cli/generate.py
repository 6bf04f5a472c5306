"""`alignedserve generate`: answers prompts without a server."""

from __future__ import annotations

from typing import Any

import click

from alignedserve.cli.help_groups import GENERATE
from alignedserve.cli.options import EngineCommand, engine_options
from alignedserve.cli.progress import busy, in_terminal
from alignedserve.engine.lora_modules import parse_lora_modules


@click.command("generate", cls=EngineCommand, groups=GENERATE)
@click.argument("model", required=False)
@click.option("--prompt", "-p", "prompts", multiple=True, help="a prompt; repeat for more")
@click.option("--chat/--no-chat", default=None, help="use the model's chat template [default: if it has one]")
@click.option("--max-tokens", default=256, show_default=True, help="maximum tokens of an answer")
@click.option("--temperature", default=0.0, show_default=True, help="sampling temperature; 0 is greedy")
@click.option("--lora-name", help="adapter to use, one of --lora-modules [default: none]")
@engine_options
def command(
    model: str | None,
    prompts: tuple[str, ...],
    chat: bool | None,
    max_tokens: int,
    temperature: float,
    lora_name: str | None,
    **options: Any,
) -> None:
    """Answer prompts with MODEL and print the answers. Without MODEL, the demo model answers."""
    from alignedserve import LLM, SamplingParams, demo

    questions = list(prompts) or (list(demo.EXAMPLE_PROMPTS) if model in (None, demo.NAME) else [])
    if not questions:
        raise click.UsageError("give at least one --prompt")
    adapters = [adapter.name for adapter in parse_lora_modules(options["lora_modules"])]
    if lora_name is not None and lora_name not in adapters:
        known = ", ".join(adapters) or "empty"
        raise ValueError(f"lora_name={lora_name!r}: is not in --lora-modules, which are {known}")
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    with busy("Loading the model"):
        llm = LLM(model or demo.NAME, **in_terminal(options))
    if chat or (chat is None and llm.get_tokenizer().has_chat_template):
        conversations = [[{"role": "user", "content": text}] for text in questions]
        results = llm.chat(conversations, params, llm.config.use_tqdm, lora_request=lora_name)
    else:
        results = llm.generate(questions, params, llm.config.use_tqdm, lora_name)
    for question, result in zip(questions, results, strict=True):
        click.echo(f"{click.style(question, bold=True)}\n{result.outputs[0].text}\n")
    errors = [str(result.outputs[0].error) for result in results if result.outputs[0].error]
    if errors:
        raise click.ClickException("\n".join(errors))
