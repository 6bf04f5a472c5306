"""Training rows: conversations packed end to end into rows of one length. Each attends only to itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer
from torch import Tensor

from alignedserve.demo import tasks
from alignedserve.demo.tasks import PICK_FOLLOW_UPS, TASKS, TaskExample, TaskQuestion
from alignedserve.demo.vocabulary import ASSISTANT, END, PAD, SYSTEM, USER
from alignedserve.demo.words import pronounceable
from research.demo_model.recipe import TrainingStage

SYSTEM_PROMPTS = ("You are a helpful assistant.", "You are a helpful assistant. Spell the word, do the list.")


@dataclass
class TrainingConversation:
    """Tokens, and the weight of each token's prediction in the loss."""

    tokens: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)


class ChatEncoder:
    """Turns messages into the tokens of the chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.pad = self._id(PAD)
        self._system, self._user = self._id(SYSTEM), self._id(USER)
        self._assistant, self._end = self._id(ASSISTANT), self._id(END)

    def _id(self, token: str) -> int:
        place = self._tokenizer.token_to_id(token)
        if place is None:
            raise ValueError(f"the tokenizer has no {token}")
        return int(place)

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def system(self, into: TrainingConversation, text: str) -> None:
        tokens = [self._system, *self._ids(text), self._end]
        into.tokens += tokens
        into.weights += [0.0] * len(tokens)

    def turn(self, into: TrainingConversation, prompt: str, answer: str, min_end_weight: float = 0.0) -> None:
        asked = [self._user, *self._ids(prompt), self._end, self._assistant]
        answered = [*self._ids(answer), self._end]
        into.tokens += asked + answered
        # A long answer weighs more than a short one, but not in proportion: most of its tokens are easy.
        each = len(answered) ** -0.5
        into.weights += [0.0] * len(asked) + [each] * (len(answered) - 1) + [max(each, min_end_weight)]


class Source:
    """Draws the conversations of a stage."""

    def __init__(self, encoder: ChatEncoder, stage: TrainingStage, rng: random.Random) -> None:
        self._encoder = encoder
        self._names, self._weights = list(stage.weights), list(stage.weights.values())
        self._min_end_weight = stage.min_end_weight
        self._rng = rng

    def _ask(self, into: TrainingConversation, prompt: str, answer: str) -> None:
        self._encoder.turn(into, prompt, answer, self._min_end_weight)

    def _single(self, example: TaskExample) -> TrainingConversation:
        conversation = TrainingConversation()
        self._ask(conversation, example.prompt, example.answer)
        return conversation

    def short(self) -> TrainingConversation:
        """Returns a conversation of one question, or sometimes of a few."""
        conversation = self._opened()
        for _ in range(1 if self._rng.random() < 0.8 else self._rng.randint(2, 4)):
            name = self._rng.choices(self._names, self._weights)[0]
            if name == "pick":
                return self.picks(3, 8, self._rng.randint(1, 4))
            example = TASKS[name].generate(self._rng)
            self._ask(conversation, example.prompt, example.answer)
        return conversation

    def lengthy(self) -> TrainingConversation:
        """Returns a conversation that rarely fits a short row: counting, repeating, a short list."""
        name = self._rng.choices(("count", "count_down", "repeat", "pick"), (2, 2, 2, 5))[0]
        if name == "pick":
            return self.picks(5, 20, self._rng.randint(2, 8))
        return self._single(TASKS[name].generate(self._rng))

    def picks(self, min_items: int, max_items: int, num_questions: int) -> TrainingConversation:
        """Returns a list and several questions about it: most of the cost is reading the list."""
        conversation, allowed = self._opened(), list[TaskQuestion]()
        while not allowed:
            words = tasks.numbered_list(self._rng, self._rng.randint(min_items, max_items))
            questions = (tasks.pick_question(words, number) for number in range(1, len(words) + 1))
            allowed = [question for question in questions if not tasks.is_held_out("pick", question.key)]
        phrasings = TASKS["pick"].phrasings
        for question in self._rng.choices(allowed, k=num_questions):
            prompt = self._rng.choice(phrasings).format(**question.fields)
            self._ask(conversation, prompt, question.answer)
            phrasings = PICK_FOLLOW_UPS
        return conversation

    def _opened(self) -> TrainingConversation:
        conversation = TrainingConversation()
        if self._rng.random() < 0.1:
            made_up = " ".join(pronounceable(self._rng, self._rng.randint(1, 9)) for _ in range(5))
            self._encoder.system(conversation, self._rng.choice((*SYSTEM_PROMPTS, made_up)))
        return conversation


@dataclass(frozen=True)
class TrainingBatch:
    tokens: Tensor
    # Number of the conversation in its row that a token belongs to; 0 for padding.
    documents: Tensor
    # Weight of the prediction of the next token.
    weights: Tensor

    @classmethod
    def empty(cls, rows: RowShape, pad: int) -> TrainingBatch:
        size = (rows.num, rows.length)
        return cls(torch.full(size, pad), torch.zeros(size, dtype=torch.long), torch.zeros(size))

    def place(self, row: int, start: int, document: int, conversation: TrainingConversation) -> None:
        stop = start + len(conversation.tokens)
        self.tokens[row, start:stop] = torch.tensor(conversation.tokens)
        self.documents[row, start:stop] = document
        # Position i predicts token i + 1.
        self.weights[row, start : stop - 1] = torch.tensor(conversation.weights[1:])


@dataclass(frozen=True)
class RowShape:
    """The number and length of a batch's rows."""

    num: int
    length: int


def pack(draw: Callable[[], TrainingConversation], rows: RowShape, pad: int) -> TrainingBatch:
    """Fills rows first-fit until several conversations did not fit."""
    batch = TrainingBatch.empty(rows, pad)
    used, counts, num_misses = [0] * rows.num, [0] * rows.num, 0
    while num_misses < 6:
        conversation = draw()
        size = len(conversation.tokens)
        row = next((row for row in range(rows.num) if used[row] + size <= rows.length), None)
        if row is None:
            num_misses += 1
            continue
        counts[row] += 1
        batch.place(row, used[row], counts[row], conversation)
        used[row] += size
    return batch


def one_per_row(conversations: list[TrainingConversation], pad: int) -> TrainingBatch:
    batch = TrainingBatch.empty(
        RowShape(len(conversations), max(len(each.tokens) for each in conversations)), pad
    )
    for row, conversation in enumerate(conversations):
        batch.place(row, 0, 1, conversation)
    return batch
