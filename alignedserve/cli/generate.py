"""`alignedserve generate`: answers to prompts, without a server."""

from __future__ import annotations

from typing import Any

import click

from alignedserve.cli.options import EngineCommand, engine_options


@click.command("generate", cls=EngineCommand)
@click.argument("model", required=False)
@click.option("--prompt", "-p", "prompts", multiple=True, help="a prompt; repeat for several")
@click.option(
    "--chat/--no-chat", default=None, help="through the model's chat template [default: if it has one]"
)
@click.option("--max-tokens", default=256, show_default=True)
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--lora-name", help="which of --lora-modules answers [default: the model itself]")
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
    """Answer prompts with MODEL (the demo model if none is named) and print the answers."""
    from alignedserve import LLM, SamplingParams, demo

    questions = list(prompts) or (list(demo.EXAMPLE_PROMPTS) if model is None else [])
    if not questions:
        raise click.UsageError("give at least one --prompt")
    llm = LLM(model or str(demo.MODEL_DIR), **options)
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
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
