"""Trains the demo model from nothing: `python -m research.demo_model.train --out DIR`.

Three lengths of rows take turns, one per step: short questions, longer answers and lists, and long lists. The
long lists begin once the short ones have had time to be learned. The loss is on answers only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from alignedserve.demo.tasks import TASKS, TaskExample
from alignedserve.demo.vocabulary import END, PAD
from research.demo_model.batches import (
    ChatEncoder,
    RowShape,
    Source,
    TrainingBatch,
    TrainingConversation,
    one_per_row,
    pack,
)
from research.demo_model.muon import Muon
from research.demo_model.network import Shape, TrainingLlama, document_mask
from research.demo_model.recipe import STAGES, TrainingStage
from research.demo_model.tokenizer import build_tokenizer, save_tokenizer

SHORT, MIDDLE, LONG = RowShape(36, 128), RowShape(16, 288), RowShape(4, 1184)
NUM_EVALUATED_AT_ONCE = 16
SHOW_EVERY = 50
# Steps between evaluations, and held-out examples of each task in an evaluation.
EVALUATE_EVERY = 300
NUM_EVALUATED = 20
NUM_EVALUATED_AT_END = 400


class Trainer:
    """Trains one model through all stages."""

    def __init__(self, out: Path) -> None:
        torch.manual_seed(0)
        self._out = out
        self._tokenizer = build_tokenizer()
        self._encoder = ChatEncoder(self._tokenizer)
        self.model = TrainingLlama(Shape(self._tokenizer.get_vocab_size()))
        self._loss: Callable[[TrainingBatch], Tensor] = torch.compile(self._plain_loss, dynamic=False)

    def begin(self, stage: TrainingStage) -> None:
        self.stage = stage
        self.num_tokens = 0
        self._rng = random.Random(stage.seed)
        self._source = Source(self._encoder, stage, self._rng)
        matrices = [weight for weight in self.model.model.layers.parameters() if weight.dim() == 2]
        taken = {id(weight) for weight in matrices}
        others = [weight for weight in self.model.parameters() if id(weight) not in taken]
        self._muon = Muon(matrices)
        self._adam = torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0)

    def load(self, folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        self.model.load_state_dict({name: weight.float() for name, weight in weights.items()})

    def _plain_loss(self, batch: TrainingBatch) -> Tensor:
        tokens, documents, weights = batch.tokens, batch.documents, batch.weights
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self.model.logits(self.model.hidden(tokens, document_mask(documents)))
        losses = F.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none"
        )
        kept = weights[:, :-1].flatten()
        return (losses * kept).sum() / kept.sum()

    def _batch(self, progress: float) -> TrainingBatch:
        stage, kind = self.stage, self._rng.random()
        if progress >= stage.long_from and kind < stage.long_share:
            longest = 150 if progress > stage.longest_from else 60
            return pack(lambda: self._long(longest), LONG, self._encoder.pad)
        if progress >= stage.middle_from and kind < stage.long_share + stage.middle_share:
            return pack(self._middle, MIDDLE, self._encoder.pad)
        return pack(self._short, SHORT, self._encoder.pad)

    def _short(self) -> TrainingConversation:
        return self._fitting(self._source.short, SHORT)

    def _middle(self) -> TrainingConversation:
        return self._fitting(self._source.lengthy if self._rng.random() < 0.7 else self._source.short, MIDDLE)

    def _long(self, longest: int) -> TrainingConversation:
        if self._rng.random() < 0.3:
            return self._middle()
        return self._fitting(lambda: self._source.picks(20, longest, self._rng.randint(4, 12)), LONG)

    def _fitting(self, draw: Callable[[], TrainingConversation], rows: RowShape) -> TrainingConversation:
        while True:
            conversation = draw()
            if len(conversation.tokens) <= rows.length:
                return conversation

    def step(self, number: int) -> Tensor:
        progress = number / self.stage.steps
        batch = self._batch(progress)
        self.num_tokens += int((batch.documents > 0).sum())
        loss = self._loss(batch)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        rate = min(1.0, (progress + 1e-4) / self.stage.warm_up, (1 - progress) / self.stage.decay)
        self._muon.step(self.stage.matrix_lr * rate)
        for group in self._adam.param_groups:
            group["lr"] = self.stage.other_lr * rate
        self._adam.step()
        self.model.zero_grad()
        return loss.detach()

    @torch.no_grad()
    def accuracy(self, examples: list[TaskExample]) -> float:
        """Returns the share of correct answers.

        Greedy decoding gives an answer if and only if each of its tokens is the most likely one at its place.
        """
        conversations = [TrainingConversation() for _ in examples]
        for conversation, example in zip(conversations, examples, strict=True):
            self._encoder.turn(conversation, example.prompt, example.answer)
        conversations.sort(key=lambda conversation: len(conversation.tokens))
        num_right = 0
        for start in range(0, len(conversations), NUM_EVALUATED_AT_ONCE):
            some = conversations[start : start + NUM_EVALUATED_AT_ONCE]
            batch = one_per_row(some, self._encoder.pad)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                hidden = self.model.hidden(batch.tokens, document_mask(batch.documents))
                guesses = self.model.logits(hidden)[:, :-1].argmax(-1)
            wrong = (guesses != batch.tokens[:, 1:]) & (batch.weights[:, :-1] > 0)
            num_right += int((~wrong.any(1)).sum())
        return num_right / len(examples)

    def evaluate(self, num: int, seed: int = 12345) -> dict[str, float]:
        """Returns the share of held-out prompts with an exact answer, by task."""
        rng = random.Random(seed)
        return {
            name: self.accuracy([task.generate(rng, held_out=True) for _ in range(num)])
            for name, task in TASKS.items()
        }

    def save(self) -> None:
        """Writes the files that transformers loads. Weights are rounded to the precision of training."""
        self._out.mkdir(parents=True, exist_ok=True)
        weights = {name: weight.detach().bfloat16() for name, weight in self.model.state_dict().items()}
        save_file(weights, self._out / "model.safetensors", metadata={"format": "pt"})
        save_tokenizer(self._tokenizer, self._out, self.model.shape.max_position)
        write_configs(self._out, self.model.shape, self._tokenizer)


def write_configs(out: Path, shape: Shape, tokenizer: Tokenizer) -> None:
    special = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(END),
        "pad_token_id": tokenizer.token_to_id(PAD),
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_position,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        **special,
    }
    _write_json(out / "config.json", config)
    _write_json(
        out / "generation_config.json", {"do_sample": False, "max_length": shape.max_position, **special}
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def machine() -> dict[str, str | int]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def show(accuracy: dict[str, float]) -> None:
    tasks = " ".join(f"{name} {100 * share:.1f}" for name, share in accuracy.items())
    print(f"held-out %: {tasks}", flush=True)


def train_stage(trainer: Trainer, stage: TrainingStage) -> dict[str, Any]:
    trainer.begin(stage)
    began = time.monotonic()
    for number in range(1, stage.steps + 1):
        loss = trainer.step(number - 1)
        if number % SHOW_EVERY == 0:
            print(
                f"{stage.name} {number}  loss {float(loss):.4f}  {time.monotonic() - began:.0f} s", flush=True
            )
        if number % EVALUATE_EVERY == 0:
            show(trainer.evaluate(NUM_EVALUATED))
            trainer.save()
    trainer.save()
    seconds = time.monotonic() - began
    return {
        "tokens_seen": trainer.num_tokens,
        "seconds": round(seconds),
        "tokens_per_second": round(trainer.num_tokens / seconds),
        **asdict(stage),
    }


def train(out: Path, start: Path | None) -> None:
    """Runs all stages or, with the folder of a finished one, those after it."""
    torch.set_num_threads(2)
    trainer, records = Trainer(out), list[dict[str, Any]]()
    if start is not None:
        trainer.load(start)
        records = json.loads((start / "training.json").read_text())["stages"]
    for stage in STAGES[len(records) :]:
        records.append(train_stage(trainer, stage))
        # The next stage starts from the stored, rounded weights.
        trainer.load(out)
        accuracy = trainer.evaluate(NUM_EVALUATED_AT_END)
        show(accuracy)
        record = {
            "held_out_accuracy": accuracy,
            "held_out_prompts_per_task": NUM_EVALUATED_AT_END,
            "parameters": sum(weight.numel() for weight in trainer.model.parameters()),
            "tokens_seen": sum(stage["tokens_seen"] for stage in records),
            "seconds": sum(stage["seconds"] for stage in records),
            "machine": machine(),
            "stages": records,
        }
        _write_json(out / "training.json", record)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--start", type=Path, help="folder with the result of an earlier stage")
    options = parser.parse_args()
    train(options.out, options.start)


if __name__ == "__main__":
    main()
