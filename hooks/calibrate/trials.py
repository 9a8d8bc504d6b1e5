"""Measures what a model says behind spliced tokens, beside what it says where all is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import torch

from ..recall.cover import SpliceLimits
from .spliced_model import Layers, SplicedModel, Tensor, joined, part

TAIL: Final = 24  # tokens whose distributions are compared; chosen
HEAD: Final = 48  # tokens of the prompt that are exact, before what is spliced; chosen
MARGINS: Final = (SpliceLimits().margin, 32, 128)  # tried until one passes; the longer are chosen
_NEAREST: Final = 64  # tokens of distance; chosen
FURTHEST: Final = 1024  # the same, unless a caller says more; chosen: a CPU computes that
_FURTHER: Final = 4  # times the last one; chosen
_WRONG: Final = 37  # positions by which Δ is wrong in the control; chosen


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of splice.

    Attributes:
        tokens: Of each span, that are spliced.
        distance: |Δ|, in tokens; spans come from further behind, unless they move ``later``.
        joints: How many spans follow each other, each from a text of its own.
        int8: Whether copies are kept in int8.
        margin: Tokens of the last span behind those that are spliced; they are computed, as an
            engine does.
        generations: 1: all that stood before a span was computed; 2: it was spliced once, and so
            on; see ``SpliceLimits``.
        later: Whether spans come from nearer to the beginning (Δ > 0).
        opening: Whether the span stood at the very beginning of its prompt.
    """

    tokens: int
    distance: int
    joints: int = 1
    int8: bool = False
    margin: int = MARGINS[0]
    generations: int = 1
    later: bool = False
    opening: bool = False

    @property
    def delta(self) -> int:
        """By how much positions change."""
        return self.distance if self.later else -self.distance

    @property
    def head(self) -> int:
        """Tokens of the prompt that are exact, before what is spliced."""
        if self.opening:
            return self.distance
        return HEAD + self.distance * self.later

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that it needs."""
        spans = self.joints * self.tokens + self.margin
        return self.head + spans + max(TAIL, -self.delta * min(2, self.generations))


@dataclass(frozen=True, slots=True)
class Measured:
    """What a cell showed.

    Attributes:
        n: Tokens whose distributions were compared.
        kl: Mean Kullback-Leibler divergence, in nats, of the spliced distributions from those
            where all was computed.
        kl_p95: 95 % of them are below.
        agreement: Share of tokens of which both say the same first.
        wrong_kl: The mean where Δ is wrong: whether the model notices positions at all.
        without_kl: The mean where the spans are left out: what they are worth.
    """

    cell: Cell
    n: int
    kl: float
    kl_p95: float
    agreement: float
    wrong_kl: float
    without_kl: float

    def plain(self) -> dict[str, Any]:
        """As plain numbers, for a file."""
        values = asdict(self)
        return {**values.pop("cell"), **values}


@dataclass(frozen=True)
class _Trial:
    """A prompt: its exact head, spans with the texts that they were computed behind (for each the
    nearest first, one per generation), and what is computed behind them: the margin of the last
    span, and a tail."""

    head: Tensor
    spans: list[Tensor]
    befores: list[list[Tensor]]
    rest: Tensor


def grid(
    longest: int, quick: bool = False, margin: int = MARGINS[0], furthest: int = FURTHEST
) -> list[Cell]:
    """The cells to measure on a model that takes sequences of ``longest`` tokens.

    Args:
        furthest: The largest distance, unless it is ``quick``.
    """
    lengths, distances = [32, 128, 512], [_NEAREST]
    while distances[-1] * _FURTHER <= furthest:
        distances.append(distances[-1] * _FURTHER)
    if quick:
        lengths, distances = lengths[:2], distances[:2]
    cells = [Cell(tokens, distance) for tokens in lengths for distance in distances]
    cells += [Cell(128, distance, later=True) for distance in distances]
    cells += [Cell(128, 256, later=True, opening=True)]
    # As far as the furthest: what is allowed is allowed together.
    far = distances[1:]
    cells += [Cell(64, distance, joints) for joints in (2, 4, 8) for distance in far]
    cells += [Cell(128, 256, int8=True)]
    cells += [Cell(64, distance, generations=times) for times in (2, 4) for distance in far]
    cells = [replace(cell, margin=margin) for cell in cells]
    return [cell for cell in cells if cell.longest <= longest]


def measure(
    model: SplicedModel, cell: Cell, samples: int, text: Callable[[int], Tensor]
) -> Measured:
    """Measure ``cell`` on ``samples`` prompts of ``text``, which draws so many tokens of one
    text."""
    rows = [_row(model, cell, trial) for trial in _trials(cell, samples, text)]
    kl, wrong, without, agree = (torch.cat(column) for column in zip(*rows, strict=True))
    return Measured(
        cell, len(kl), float(kl.mean()), float(kl.quantile(0.95)), float(agree.mean()),
        float(wrong.mean()), float(without.mean()),
    )  # fmt: skip


def _trials(cell: Cell, samples: int, text: Callable[[int], Tensor]) -> Iterator[_Trial]:
    for _ in range(samples):
        spans = [text(cell.tokens) for _ in range(cell.joints - 1)]
        last = text(cell.tokens + cell.margin)
        # Each stood elsewhere, in a prompt of other text.
        places = [cell.head + number * cell.tokens for number in range(cell.joints)]
        befores = [[text(place - cell.delta), *_further(cell, text)] for place in places]
        rest = torch.cat([last[cell.tokens :], text(TAIL)])
        yield _Trial(text(cell.head), [*spans, last[: cell.tokens]], befores, rest)


def _further(cell: Cell, text: Callable[[int], Tensor]) -> list[Tensor]:
    return [text(cell.distance) for _ in range(cell.generations - 1)]


def _row(model: SplicedModel, cell: Cell, trial: _Trial) -> tuple[Tensor, ...]:
    whole = torch.cat([trial.head, *trial.spans, trial.rest])
    truth = model.logits(whole)[-TAIL:]
    head = model.states(trial.head)
    read = [_read(model, cell, *each) for each in zip(trial.befores, trial.spans, strict=True)]
    spliced = _behind(model, cell, head, read, trial.rest, cell.delta)
    wrong = _behind(model, cell, head, read, trial.rest, cell.delta + _WRONG)
    without = model.logits(torch.cat([trial.head, trial.rest]))[-TAIL:]
    agree = (truth.argmax(-1) == spliced.argmax(-1)).float()
    return _kl(truth, spliced), _kl(truth, wrong), _kl(truth, without), agree


def _read(model: SplicedModel, cell: Cell, befores: Sequence[Tensor], span: Tensor) -> Layers:
    """Keys and values of a span behind the text before it, which is spliced if it has one too."""
    before, *further = befores
    if further:
        behind = model.moved(_read(model, cell, further, before), cell.delta, cell.int8)
        states: Layers = model.states(span, len(before), behind)
        return states
    return part(model.states(torch.cat([before, span])), len(before), len(before) + len(span))


def _behind(
    model: SplicedModel, cell: Cell, head: Layers, read: Sequence[Layers], rest: Tensor, delta: int
) -> Tensor:
    """Logits of the tail behind the head and what was read, moved by ``delta``."""
    moved = [model.moved(each, delta, cell.int8) for each in read]
    return model.logits(rest, joined([head, *moved]))[-TAIL:]


def _kl(truth: Tensor, other: Tensor) -> Tensor:
    """Divergence of ``other`` from ``truth``, in nats, by row."""
    p, q = truth.log_softmax(-1), other.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).cpu()
