"""Runs agents on a live server: each calls a tool after every turn, and its next prompt has all that was said before.

    python -m benchmarks.agents_live [--agents 20] [--turns 30] [--instances 2+2] [--kill SECONDS] [--max-kills N]
        [--seed 1] [--common 4000] [--new 380] [--letters 85] [--memory-mib 1024] [--out FILE]

Sizes are those of agents that were simulated (benchmarks/results/turns.md). A tool takes a tenth of the time: 0.1 to
1 s. Agents are streamed chats over HTTP with `tools` and tool messages. The model is a small random-weight Llama with
a template for tools. A regex makes each answer a call with random letters, which are the same tokens in the next
prompt. With `--kill`, one instance after the other is killed, at this interval.

New tokens of a turn are those that don't repeat the agent's last prompt and answer. The instructions are new in the
first prompt that is answered. A turn computes again the part of a block at the end of what was said, and what was not
found. The digest covers all tokens. They depend on seed and sizes only, not on the layout or on kills.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import httpx2
import openai

from alignedserve import demo
from alignedserve.demo.vocabulary import SPECIAL_TOKENS, USER
from alignedserve.launch.ports import free_port
from benchmarks.harness import JSON_FILE, facts, parser_of, progress, say, write_json
from benchmarks.rt_with_be.arithmetic import parse_metrics, total
from benchmarks.rt_with_be.served import HOST, running

NAME = "chat"
BLOCK_SIZE = 16
NUM_COMMON, NUM_NEW = 4000, 380
# Seconds that a tool takes, and within which the agents start.
TOOL_S = (0.1, 1.0)
START_S = 1.0
# With the text around them, about as many tokens as a simulated answer has.
NUM_LETTERS = 85
# A turn that fails is tried again.
MAX_FAILURES, AGAIN_S = 20, 0.2
ANSWER_S, LOOK_S, ALL_S = 120.0, 60.0, 1800.0
# The server measures its machine first.
READY_S = 600.0
MAX_MODEL_LEN = 32768
OPTIONS = (
    *("--load-format", "dummy", "--dtype", "float32"),
    *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "32"),
    # A kill ends the connection at once. A slow process must not count as dead.
    *("--silence-s", "600"),
)
# As Qwen's is, in short. It writes calls as CALL does.
TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + ('user' if message.role == 'tool' else message.role) + '|>' + (message.content or '') -}}"
    "{%- if message.role == 'system' -%}{%- for tool in tools or [] -%}{{- tool | tojson -}}{%- endfor -%}{%- endif -%}"
    "{%- for call in message.tool_calls or [] -%}"
    """{{- '<tool_call>{"name":"' + call.function.name + '","arguments":' -}}"""
    "{{- call.function.arguments | tojson + '}</tool_call>' -}}"
    "{%- endfor -%}{{- '<|end|>' -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
CALL = r'<tool_call>\{{"name":"search","arguments":\{{"query": "[a-z]{{{}}}"\}}\}}</tool_call>'
TOOL_NAME = "search"
TOOL = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}},
            "required": ["query"],
            "additionalProperties": False,
        },
    },
}


@dataclass(frozen=True)
class Turn:
    agent: int
    number: int
    num_prompt: int
    # Tokens of the prompt that repeat what was said.
    num_known: int
    # Tokens of the last prompt and answer, all of which it should repeat.
    num_said: int
    num_cached: int
    num_answer: int
    ttft_s: float

    @property
    def num_again(self) -> int:
        """Tokens of earlier turns that were computed again."""
        return self.num_known - self.num_cached

    @property
    def num_of_block(self) -> int:
        """Those of them after the last full block. An answer's last token has no KV."""
        return self.num_known - (self.num_known - 1) // BLOCK_SIZE * BLOCK_SIZE


@dataclass
class Seen:
    turns: list[Turn] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    # Instances, in the order in which they were killed.
    killed: list[str] = field(default_factory=list)
    # By /metrics: all computed tokens, and how often a request lost its instance.
    num_computed: float = 0.0
    num_recoveries: float = 0.0
    seconds: float = 0.0
    # The tokens of each agent's last prompt and answer.
    said: dict[int, list[int]] = field(default_factory=dict)

    def figures(self) -> dict[str, Any]:
        later = [each for each in self.turns if each.number]
        new = sum(each.num_prompt - each.num_known for each in self.turns)
        ttfts_s = sorted(each.ttft_s for each in later)
        computed = self.num_computed - sum(each.num_answer - 1 for each in self.turns)
        words = json.dumps([self.said[number] for number in sorted(self.said)])
        return {
            "num_turns": len(self.turns),
            "num_new": new,
            # Tokens of the first prompts that were computed again.
            "num_again_first": sum(each.num_again for each in self.turns if not each.number),
            "num_computed": round(computed),
            "num_not_cached": sum(each.num_prompt - each.num_cached for each in self.turns),
            "ratio": computed / new,
            "again_per_turn": statistics.fmean(each.num_again for each in later),
            "of_block_per_turn": statistics.fmean(each.num_of_block for each in later),
            "ttft_p50_s": statistics.median(ttfts_s),
            "ttft_p99_s": ttfts_s[int(0.99 * len(ttfts_s))],
            "num_retold": sum(each.num_known < each.num_said for each in later),
            # (agent, turn, tokens) of the turns that computed more again than the part of a block.
            "not_found": [
                (each.agent, each.number, each.num_again - each.num_of_block)
                for each in later
                if each.num_again != each.num_of_block
            ],
            "failures": self.failures,
            "killed": self.killed,
            "num_recoveries": round(self.num_recoveries),
            "longest_prompt": max(each.num_prompt for each in self.turns),
            "seconds": self.seconds,
            "digest": hashlib.sha256(words.encode()).hexdigest()[:16],
        }


def make_agent_model(directory: Path) -> None:
    config = json.loads((demo.MODEL_DIR / "config.json").read_text())
    config |= {"num_hidden_layers": 2, "max_position_embeddings": MAX_MODEL_LEN}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    shutil.copy(demo.MODEL_DIR / "tokenizer.json", directory)
    given = json.loads((demo.MODEL_DIR / "tokenizer_config.json").read_text())
    given |= {"chat_template": TEMPLATE, "model_max_length": MAX_MODEL_LEN}
    (directory / "tokenizer_config.json").write_text(json.dumps(given))


class Agents:
    def __init__(self, client: openai.AsyncOpenAI, args: Namespace) -> None:
        self.seen = Seen()
        self._client = client
        self._args = args
        self._common = letters(random.Random(f"instructions {args.seed}"), args.common)

    async def run(self) -> None:
        await asyncio.gather(*map(self._agent, range(self._args.agents)))

    async def _agent(self, number: int) -> None:
        dice = random.Random(f"{self._args.seed} {number}")
        said: list[int] = []
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": self._common},
            {"role": "user", "content": self._something_new(dice)},
        ]
        await asyncio.sleep(dice.uniform(0.0, START_S))
        for turn in range(self._args.turns):
            said, message = await self._turn(number, turn, messages, said)
            self.seen.said[number] = said
            await asyncio.sleep(dice.uniform(*TOOL_S))
            call_id = message["tool_calls"][0]["id"]
            found = {"role": "tool", "tool_call_id": call_id, "content": self._something_new(dice)}
            messages += [message, found]

    def _something_new(self, dice: random.Random) -> str:
        return letters(dice, dice.randint(self._args.new // 2, self._args.new * 3 // 2))

    async def _turn(
        self, agent: int, number: int, messages: Sequence[dict[str, Any]], said: list[int]
    ) -> tuple[list[int], dict[str, Any]]:
        """Returns all that was said, and the answer."""
        seed = 1000 * agent + number
        while True:
            try:
                answer = await ask(self._client, messages, self._args.letters, seed)
                break
            except (openai.APIError, httpx2.TransportError, CutAnswer) as error:
                self.seen.failures.append(f"agent {agent}, turn {number}: {error!r}")
                if len(self.seen.failures) > MAX_FAILURES:
                    raise
                await asyncio.sleep(AGAIN_S)
        # The first user message follows the instructions.
        instructions = answer.prompt[: answer.prompt.index(SPECIAL_TOKENS.index(USER))]
        num_known = num_alike(answer.prompt, said or (instructions if self.seen.turns else []))
        counts = len(answer.prompt), num_known, len(said), answer.num_cached, len(answer.tokens)
        self.seen.turns.append(Turn(agent, number, *counts, answer.ttft_s))
        return answer.prompt + answer.tokens, answer.message()


class CutAnswer(Exception):
    pass


@dataclass
class Answer:
    ttft_s: float = 0.0
    num_cached: int = 0
    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    # The call, in pieces.
    call_id: str = ""
    name: str = ""
    arguments: str = ""

    def message(self) -> dict[str, Any]:
        call = {"id": self.call_id, "type": "function"}
        function = {"name": self.name, "arguments": self.arguments}
        return {"role": "assistant", "content": None, "tool_calls": [call | {"function": function}]}


async def ask(
    client: openai.AsyncOpenAI, messages: Sequence[dict[str, Any]], num_letters: int, seed: int
) -> Answer:
    answer, finish_reason, begun_s = Answer(), None, time.perf_counter()
    create: Any = client.chat.completions.create
    stream = await create(
        model=NAME,
        messages=messages,
        tools=[TOOL],
        seed=seed,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_token_ids": True, "structured_outputs": {"regex": CALL.format(num_letters)}},
    )
    async for chunk in stream:
        answer.prompt = answer.prompt or (chunk.model_extra or {}).get("prompt_token_ids") or []
        if chunk.usage:
            answer.num_cached = chunk.usage.prompt_tokens_details.cached_tokens or 0
        for choice in chunk.choices:
            finish_reason = choice.finish_reason or finish_reason
            if tokens := (choice.model_extra or {}).get("token_ids"):
                answer.ttft_s = answer.ttft_s or time.perf_counter() - begun_s
                answer.tokens += tokens
            for call in choice.delta.tool_calls or []:
                answer.call_id += call.id or ""
                answer.name += call.function.name or ""
                answer.arguments += call.function.arguments or ""
    if answer.name != TOOL_NAME or not answer.prompt or finish_reason != "tool_calls":
        raise CutAnswer(f"not a complete call: {answer.name!r}, {answer.arguments!r}, {finish_reason}")
    return answer


def letters(dice: random.Random, count: int) -> str:
    """Each is a token of the demo model's tokenizer."""
    return "".join(dice.choices(ascii_lowercase, k=count))


def num_alike(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns the length of their common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


@contextmanager
def serving(model: Path, *options: str) -> Iterator[str]:
    """Starts a server, and yields the URL of its API."""
    port = free_port(HOST)
    with tempfile.TemporaryDirectory(prefix="state-", dir="/tmp", ignore_cleanup_errors=True) as state:
        command = [sys.executable, "-m", "alignedserve", "serve", str(model), "--served-model-name", NAME]
        command += ["--host", HOST, "--port", str(port), "--state-dir", state, "--device", "cpu", *options]
        with running(command, Path(state) / "log", "ready after", READY_S):
            yield f"http://{HOST}:{port}/v1"


def layout_options(instances: str) -> list[str]:
    """`instances`: prefill+decode instances, or colocated ones."""
    first, *others = instances.split("+")
    if not others:
        return ["--colocated-instances", first]
    return ["--prefill-instances", first, "--decode-instances", *others]


def pids_of_instances(url: str) -> dict[str, int]:
    """Returns the pid of each instance that is up, by its id."""
    cluster = httpx2.get(url.removesuffix("/v1") + "/v1/cluster", timeout=LOOK_S).raise_for_status().json()
    return {
        process["instance_id"]: process["pid"]
        for process in cluster["processes"]
        if process["role"] in ("prefill", "decode", "colocated") and process["state"] == "up"
    }


async def kill_in_turn(url: str, args: Namespace, killed: list[str]) -> None:
    """Kills one instance after the other, each time if all are up."""
    names = sorted(await asyncio.to_thread(pids_of_instances, url))
    while len(killed) < args.max_kills:
        await asyncio.sleep(args.kill)
        try:
            pids = await asyncio.to_thread(pids_of_instances, url)
        except httpx2.HTTPError:
            continue
        if len(pids) == len(names):
            name = names[len(killed) % len(names)]
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[name], signal.SIGKILL)
                killed.append(name)


async def measure(url: str, args: Namespace) -> Seen:
    async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0, timeout=ANSWER_S) as client:
        agents = Agents(client, args)
        before, begun_s = counters(url), time.perf_counter()
        killer = asyncio.create_task(kill_in_turn(url, args, agents.seen.killed)) if args.kill else None
        try:
            async with asyncio.timeout(ALL_S):
                await agents.run()
        finally:
            if killer:
                killer.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await killer
    agents.seen.seconds = time.perf_counter() - begun_s
    computed, recoveries = (now - then for now, then in zip(counters(url), before, strict=True))
    agents.seen.num_computed, agents.seen.num_recoveries = computed, recoveries
    return agents.seen


def counters(url: str) -> tuple[float, float]:
    """Returns the numbers of computed tokens and of recoveries."""
    answer = httpx2.get(url.removesuffix("/v1") + "/metrics", timeout=LOOK_S)
    samples = parse_metrics(answer.raise_for_status().text)
    return total(samples, "computed_tokens_total"), total(samples, "recoveries_total")


def line_of(found: dict[str, Any]) -> str:
    return (
        f"prompt tokens computed: {found['num_computed']:,} of {found['num_new']:,} new ones ({found['ratio']:.3f}); "
        f"computed again: {found['num_again_first']:,} of first prompts, then {found['again_per_turn']:.1f} a turn, "
        f"{found['of_block_per_turn']:.1f} of them parts of blocks, {len(found['not_found'])} turns more; "
        f"TTFT from the second turn on: p50 "
        f"{1e3 * found['ttft_p50_s']:.1f} ms, p99 {1e3 * found['ttft_p99_s']:.1f} ms; "
        f"{found['num_turns']} turns, {len(found['killed'])} kills, {found['num_recoveries']} recoveries, "
        f"{len(found['failures'])} failures, {found['seconds']:.0f} s"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, out=JSON_FILE)
    parser.add_argument("--agents", type=int, default=20)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--instances", default="2+2", help="prefill+decode instances, or colocated ones")
    parser.add_argument("--kill", type=float, metavar="SECONDS", help="seconds from one kill to the next")
    parser.add_argument("--max-kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--common", type=int, default=NUM_COMMON, help="tokens of the instructions")
    parser.add_argument("--new", type=int, default=NUM_NEW, help="tokens that a turn adds, on average")
    parser.add_argument("--letters", type=int, default=NUM_LETTERS, help="letters in each answer")
    parser.add_argument(
        "--memory-mib", type=int, default=1024, help="for each instance's KV; the pool has twice as much"
    )
    args = parser.parse_args(arguments)
    if args.turns < 2:
        parser.error(
            f"--turns {args.turns}: must be at least 2, because it is the next turn that finds something"
        )
    with tempfile.TemporaryDirectory() as directory, progress(None, "server") as bar:
        bar.set_description("starting a server")
        model = Path(directory, "model")
        make_agent_model(model)
        memory = (
            *("--kv-cache-memory-bytes", str(args.memory_mib << 20)),
            *("--pool-memory-bytes", str(2 * args.memory_mib << 20)),
        )
        with serving(model, *OPTIONS, *memory, *layout_options(args.instances)) as url:
            bar.set_description("agents")
            found = asyncio.run(measure(url, args)).figures()
    say(line_of(found))
    write_json(args.out, facts({args.out: "FILE"}) | found)


if __name__ == "__main__":
    main()
