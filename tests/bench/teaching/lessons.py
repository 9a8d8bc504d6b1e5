"""What a small model is shown, batch by batch: copying first, then recall, then text.

Copying (random tokens that repeat with a random period) forms the heads that look up what followed
last time; without it, a small model stays at chance on recall for a long time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from .recall_language import SIZE, make_quiz

IGNORED: Final = -100  # the target of a token that is not judged: torch's own number
_COPY_STEPS: Final = 200  # before recall
_COPIED_BEFORE_TEXT: Final = 500
_COPY_SHAPE: Final = (64, 48)
_COPIED: Final = 320  # tokens that copying is learned with: bytes, and the most frequent pairs
_PASSED: Final = 0.96  # of the answers, before texts grow longer
_GROWTH: Final = 1.4
_SHORTEST: Final = 40  # tokens of a quiz; chosen: three facts and two questions fit
_REVISION: Final = 8  # one batch in eight is of the other kind
_NEEDLES: Final = 4  # one window of text in four has a needle
_NEEDLE: Final = "\n\nRemember: the code of {name} is {code}.\n\n"
_SYLLABLES: Final = (
    "ba",
    "ce",
    "di",
    "fo",
    "gu",
    "ka",
    "le",
    "mi",
    "no",
    "pu",
    "ra",
    "se",
    "ti",
    "vo",
)

Ids = NDArray[np.int64]


class Batch(NamedTuple):
    """Tokens [texts, tokens], and for each what comes next, or ``IGNORED``."""

    ids: Ids
    targets: Ids
    kind: str


class Lessons(Protocol):
    """A course; ``state`` is how far it is."""

    state: dict[str, float]

    def batch(self, step: int, random: np.random.Generator) -> Batch:
        """What is shown at ``step``."""

    def heard(self, batch: Batch, right: float) -> None:
        """Note what share of a batch's judged tokens was answered right."""


def copying(random: np.random.Generator, vocabulary: int) -> Batch:
    """Random tokens that repeat with a random period; judged from the second time on."""
    texts, tokens = _COPY_SHAPE
    period = int(random.integers(4, tokens // 2 + 1))
    once = random.integers(1, vocabulary, size=(texts, period))
    ids = np.tile(once, (1, tokens // period + 2))[:, : tokens + 1]
    targets = ids[:, 1:].copy()
    targets[:, : period - 1] = IGNORED
    return Batch(ids[:, :-1], targets, "copying")


@dataclass
class RecallLessons:
    """Copying, then quizzes that grow from 64 tokens to ``longest`` as they are passed.

    Every other quiz is shorter, of any length down to ``_SHORTEST``: whoever sees long texts alone
    forgets how to read what is left of one.
    """

    longest: int = 512
    tokens: int = 4096  # in a batch
    state: dict[str, float] = field(default_factory=lambda: {"length": 64.0, "right": 0.0})

    def batch(self, step: int, random: np.random.Generator) -> Batch:
        """A quiz, or copying at first and once in eight steps."""
        if step < _COPY_STEPS or step % _REVISION == 0:
            return copying(random, SIZE)
        length = int(self.state["length"])
        if step % 2:
            length = int(np.exp(random.uniform(np.log(_SHORTEST), np.log(length))))
        questions = max(2, min(8, length // 32))
        facts = max(3, min(32, (length - questions * 5) // 10))
        facts = int(random.integers(3, facts + 1))
        quiz = make_quiz(max(4, self.tokens // length), length, facts, questions, random)
        targets = np.where(quiz.answered, quiz.ids, IGNORED)[:, 1:]
        return Batch(quiz.ids[:, :-1], targets, "recall")

    def heard(self, batch: Batch, right: float) -> None:
        """Make texts longer once the running share of right answers is high enough."""
        if batch.kind != "recall" or batch.ids.shape[1] + 1 < self.state["length"]:
            return
        self.state["right"] += 0.1 * (right - self.state["right"])
        if self.state["right"] > _PASSED and self.state["length"] < self.longest:
            self.state["length"] = float(min(self.longest, int(self.state["length"] * _GROWTH)))
            self.state["right"] = 0.0


@dataclass
class TextLessons:
    """Copying, then windows of a text: short ones at first, with a needle in every fourth."""

    tokenizer: Tokenizer
    taught: NDArray[np.uint16]  # tokens to read, uint16 [tokens]
    halfway: int  # the step from which windows have the full length
    length: int = 1024
    short: int = 256
    tokens: int = 4096
    state: dict[str, float] = field(default_factory=dict)

    def batch(self, step: int, random: np.random.Generator) -> Batch:
        """Windows of the text; copying for the first steps."""
        if step < _COPIED_BEFORE_TEXT:
            return copying(random, _COPIED)
        length = self.short if step < self.halfway else self.length
        rows = [self._window(length, n, random) for n in range(self.tokens // length)]
        ids = np.stack(rows).astype(np.int64)
        return Batch(ids[:, :-1], ids[:, 1:].copy(), "text")

    def heard(self, batch: Batch, right: float) -> None:
        """Do nothing: the order of these lessons is fixed."""

    def _window(self, length: int, number: int, random: np.random.Generator) -> Ids:
        start = int(random.integers(0, len(self.taught) - length - 1))
        window = self.taught[start : start + length + 1].astype(np.int64)
        return self._with_needle(window, random) if number % _NEEDLES == 0 else window

    def _with_needle(self, window: Ids, random: np.random.Generator) -> Ids:
        """The window with a sentence in its middle that comes again at its end."""
        said = np.array(self.tokenizer.encode(needle(random)).ids)
        at = int(random.integers(0, len(window) - 2 * len(said)))
        rest = window[: len(window) - 2 * len(said)]
        return np.concatenate([rest[:at], said, rest[at:], said])


def needle(random: np.random.Generator) -> str:
    """A sentence that cannot be guessed: a made-up name and its code of five digits."""
    name = "".join(random.choice(_SYLLABLES, size=3)).capitalize()
    return _NEEDLE.format(name=name, code="".join(map(str, random.integers(0, 10, size=5))))
