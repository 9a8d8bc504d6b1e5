"""Compares a model's next tokens after spliced text with those after computing the whole text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, TypeAlias

import torch

from ...graph.errors import ConfigError
from ...kernels.quant import dequantize, quantize
from ...kernels.rope import Rope
from ..recall.cover import SpliceLimits

Tensor: TypeAlias = torch.Tensor
Layers: TypeAlias = list[tuple[Tensor, Tensor]]  # K and V by layer, each [1, heads, tokens, dims]

_SHIFT: Final = 37  # positions; chosen: no multiple of anything
_MOST_ERROR: Final = 0.02  # relative error of a rotated key; bfloat16 alone has 0.004; chosen


@dataclass(frozen=True)
class SplicedModel:
    """A causal language model that can read keys and values from other positions."""

    model: Any  # from transformers, in evaluation mode
    rope: Rope  # the rotation of its keys

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def states(self, ids: Tensor, start: int = 0, before: Layers | None = None) -> Layers:
        """Return keys and values of ``ids``, int64 [tokens], computed from position ``start`` on,
        after ``before``.
        """
        out = self._run(ids, start, before)
        known = _tokens(before)
        return [
            (layer.keys[:, :, known:], layer.values[:, :, known:])
            for layer in out.past_key_values.layers
        ]

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def logits(self, ids: Tensor, before: Layers | None = None) -> Tensor:
        """Return each next token's logits after ``before``, float32 [tokens, vocabulary]."""
        logits: Tensor = self._run(ids, _tokens(before), before).logits[0].float()
        return logits

    def moved(self, layers: Layers, delta: int, int8: bool = False) -> Layers:
        """Return ``layers`` moved by ``delta`` positions as a splice would, via int8 if asked."""
        return [
            (self._turned(_kept(keys, int8), delta), _kept(values, int8)) for keys, values in layers
        ]

    def check_rotation(self, ids: Tensor) -> None:
        """Compare moved keys with computed ones in every layer. Raises ConfigError."""
        moved, there = self.moved(self.states(ids), _SHIFT), self.states(ids, _SHIFT)
        for number, ((got, _), (wanted, _)) in enumerate(zip(moved, there, strict=True)):
            error = float((got.float() - wanted.float()).norm() / wanted.float().norm())
            if not error <= _MOST_ERROR:
                raise ConfigError(
                    f"keys of layer {number} do not rotate as this model's configuration says "
                    f"(relative error {error:.3f}): they cannot be moved to other positions"
                )

    def _run(self, ids: Tensor, start: int, before: Layers | None) -> Any:
        from transformers import DynamicCache

        cache = DynamicCache()
        for number, (keys, values) in enumerate(before or ()):
            cache.update(keys, values, number)
        places = torch.arange(start, start + len(ids), device=ids.device)
        return self.model(
            input_ids=ids[None], position_ids=places[None], past_key_values=cache, use_cache=True
        )

    def _turned(self, keys: Tensor, delta: int) -> Tensor:
        """Rotate keys as the kernels do: in float32, rounded once."""
        deltas = torch.full((keys.shape[2],), delta, dtype=torch.int64, device=keys.device)
        cos, sin = self.rope.rotation(deltas)
        turned = self.rope.rotate(keys[0].transpose(0, 1).float(), cos, sin)
        return turned.transpose(0, 1)[None].to(keys.dtype)


def part(layers: Layers, first: int, end: int) -> Layers:
    return [(keys[:, :, first:end], values[:, :, first:end]) for keys, values in layers]


def joined(parts: Sequence[Layers]) -> Layers:
    return [
        (torch.cat([keys for keys, _ in layer], 2), torch.cat([values for _, values in layer], 2))
        for layer in zip(*parts, strict=True)
    ]


def _tokens(layers: Layers | None) -> int:
    return int(layers[0][0].shape[2]) if layers else 0


def _kept(states: Tensor, int8: bool) -> Tensor:
    return dequantize(*quantize(states.float())).to(states.dtype) if int8 else states


TAIL: Final = 24  # tokens whose distributions are compared; chosen
HEAD: Final = 48  # exact tokens at the start of the prompt, before spliced ones; chosen
MARGINS: Final = (SpliceLimits().margin, 32, 128)  # tried until one passes; the longer are chosen
_NEAREST: Final = 64  # shortest distance in tokens; chosen
FURTHEST: Final = 1024  # largest distance, by default; chosen: a CPU computes that
_FURTHER: Final = 4  # factor from one distance to the next; chosen
_WRONG: Final = 37  # positions by which Δ is wrong in the control measurement; chosen


@dataclass(frozen=True, slots=True)
class Cell:
    tokens: int  # spliced tokens of each span
    distance: int  # |Δ|, in tokens; towards the beginning, unless `later`
    joints: int = 1  # consecutive spans, each from a text of its own
    int8: bool = False  # whether copies are kept in int8
    margin: int = MARGINS[0]  # computed tokens of the last span after its spliced ones
    # 1: all text before a span was computed; 2: it was spliced once; and so on. See `SpliceLimits`.
    generations: int = 1
    later: bool = False  # spans move towards the end (Δ > 0)
    opening: bool = False  # the span stood at the very beginning of its prompt

    @property
    def delta(self) -> int:
        return self.distance if self.later else -self.distance

    @property
    def head(self) -> int:
        """Number of exact tokens of the prompt before the spliced ones."""
        if self.opening:
            return self.distance
        return HEAD + self.distance * self.later

    @property
    def longest(self) -> int:
        spans = self.joints * self.tokens + self.margin
        return self.head + spans + max(TAIL, -self.delta * min(2, self.generations))


@dataclass(frozen=True, slots=True)
class CellResult:
    """What was measured for a cell; divergences are Kullback-Leibler divergences, in nats."""

    cell: Cell
    n: int  # tokens whose distributions were compared
    kl: float  # mean divergence of the spliced distributions from the computed ones
    kl_p95: float  # its 95th percentile
    agreement: float  # share of tokens with the same first choice in both
    wrong_kl: float  # divergence with a wrong Δ: does the model notice positions?
    without_kl: float  # divergence without the spans: what are they worth?

    def plain(self) -> dict[str, Any]:
        values = asdict(self)
        return {**values.pop("cell"), **values}


@dataclass(frozen=True)
class _Trial:
    head: Tensor  # exact tokens at the start of the prompt
    spans: list[Tensor]
    # For each span, the texts that it was computed after: nearest first, one per generation.
    befores: list[list[Tensor]]
    rest: Tensor  # computed after the spans: the last one's margin, and a tail


def grid(
    longest: int, quick: bool = False, margin: int = MARGINS[0], furthest: int = FURTHEST
) -> list[Cell]:
    """Return the cells to measure on a model that takes sequences of ``longest`` tokens."""
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
) -> CellResult:
    """Measure ``cell`` on ``samples`` prompts; ``text(n)`` draws ``n`` tokens of one text."""
    rows = [_row(model, cell, trial) for trial in _trials(cell, samples, text)]
    kl, wrong, without, agree = (torch.cat(column) for column in zip(*rows, strict=True))
    return CellResult(
        cell, len(kl), float(kl.mean()), float(kl.quantile(0.95)), float(agree.mean()),
        float(wrong.mean()), float(without.mean()),
    )  # fmt: skip


def _trials(cell: Cell, samples: int, text: Callable[[int], Tensor]) -> Iterator[_Trial]:
    for _ in range(samples):
        spans = [text(cell.tokens) for _ in range(cell.joints - 1)]
        last = text(cell.tokens + cell.margin)
        # Each stood elsewhere, in a prompt of other text.
        places = [cell.head + number * cell.tokens for number in range(cell.joints)]
        later = range(cell.generations - 1)
        befores = [
            [text(place - cell.delta), *(text(cell.distance) for _ in later)] for place in places
        ]
        rest = torch.cat([last[cell.tokens :], text(TAIL)])
        yield _Trial(text(cell.head), [*spans, last[: cell.tokens]], befores, rest)


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
    before, *further = befores
    if further:
        behind = model.moved(_read(model, cell, further, before), cell.delta, cell.int8)
        states: Layers = model.states(span, len(before), behind)
        return states
    return part(model.states(torch.cat([before, span])), len(before), len(before) + len(span))


def _behind(
    model: SplicedModel, cell: Cell, head: Layers, read: Sequence[Layers], rest: Tensor, delta: int
) -> Tensor:
    moved = [model.moved(each, delta, cell.int8) for each in read]
    return model.logits(rest, joined([head, *moved]))[-TAIL:]


def _kl(truth: Tensor, other: Tensor) -> Tensor:
    """The divergence of ``other`` from ``truth``, in nats, by row."""
    p, q = truth.log_softmax(-1), other.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).cpu()


@dataclass(frozen=True, slots=True)
class PassMark:
    """What a cell must reach; chosen: a tenth of a nat moves a coin's 0.5 to 0.72."""

    most_kl: float = 0.1  # mean divergence, in nats
    least_agreement: float = 0.9  # share of tokens with the same first choice

    def passes(self, measured: CellResult) -> bool:
        return self.allows(measured.kl, measured.agreement)

    def allows(self, kl: float, agreement: float) -> bool:
        return kl <= self.most_kl and agreement >= self.least_agreement


DEFAULT_BAR: Final = PassMark()


@dataclass(frozen=True, slots=True)
class CalibrationVerdict:
    """Whether a model passed, why, and which moves are allowed."""

    passed: bool
    reason: str
    limits: SpliceLimits


def judge_margins(
    grids: Iterable[Sequence[Cell]],
    measure: Callable[[Cell], CellResult],
    bar: PassMark = DEFAULT_BAR,
) -> tuple[CalibrationVerdict, list[CellResult]]:
    """Judge one grid after the other, each with a longer margin, until one passes. Returns the
    verdict on the last grid measured, and the results of all grids.
    """
    verdict, shown = judge([], bar), list[CellResult]()
    for cells in grids:
        if shown and (verdict.passed or not cells):
            break
        measured = [measure(cell) for cell in cells]
        verdict, shown = judge(measured, bar), [*shown, *measured]
    return verdict, shown


def judge(measured: Sequence[CellResult], bar: PassMark = DEFAULT_BAR) -> CalibrationVerdict:
    """Allow what was measured and passed, and nothing shorter, further or with more joints.

    All of ``measured`` has one margin, which the limits adopt. The limits are found in turn: the
    shortest span length at and above which all pass at the nearest distance; the largest distance
    up to which these lengths pass; up to that distance, the number of joints and of generations.
    Moves towards the end and openings of prompts are judged separately.
    """
    exact = [each for each in measured if not each.cell.int8]
    single = [each for each in exact if each.cell.joints == each.cell.generations == 1]
    later = [each for each in single if each.cell.later]
    single = [each for each in single if not each.cell.later]
    if not single:
        return CalibrationVerdict(
            False, "the model takes no sequence that is long enough", SpliceLimits()
        )
    nearest = min(each.cell.distance for each in single)
    near = [each for each in single if each.cell.distance == nearest]
    least = _least((each.cell.tokens, bar.passes(each)) for each in near)
    if least is None:
        return CalibrationVerdict(False, _why_not(near, bar), SpliceLimits())
    fit = [each for each in single if each.cell.tokens >= least]
    furthest = _most((each.cell.distance, bar.passes(each)) for each in fit) or nearest
    within = [each for each in exact if each.cell.distance <= furthest and not each.cell.later]
    joints = _most((each.cell.joints, bar.passes(each)) for each in within if each.cell.joints > 1)
    again = [(each.cell.generations, bar.passes(each)) for each in within]
    generations = _most(each for each in again if each[0] > 1)
    inside = [each for each in later if not each.cell.opening]
    most_later = _most((each.cell.distance, bar.passes(each)) for each in inside)
    openings = {bar.passes(each) for each in later if each.cell.opening}
    limits = SpliceLimits(
        least, furthest, joints or 1, single[0].cell.margin, generations or 1, most_later or 0,
        openings == {True},
    )  # fmt: skip
    return CalibrationVerdict(True, _words(limits, bar), limits)


def _least(results: Iterable[tuple[int, bool]]) -> int | None:
    found: int | None = None
    for value, passes in sorted(results, reverse=True):
        if not passes:
            break
        found = value
    return found


def _most(results: Iterable[tuple[int, bool]]) -> int | None:
    found: int | None = None
    failed = False
    for value, passes in sorted(results, key=lambda each: (each[0], each[1])):
        failed |= not passes
        if failed:
            break
        found = value
    return found


def _why_not(near: Sequence[CellResult], bar: PassMark) -> str:
    longest = max(near, key=lambda each: each.cell.tokens)
    return (
        f"{longest.cell.tokens} tokens moved by {longest.cell.distance} change what it says, "
        f"{longest.cell.margin} computed tokens further on: "
        f"{longest.kl:.3f} nats (allowed: {bar.most_kl}), {100 * longest.agreement:.0f} % of the "
        f"tokens stay the same (needed: {100 * bar.least_agreement:.0f} %)"
    )


def _words(limits: SpliceLimits, bar: PassMark) -> str:
    pieces = "one piece" if limits.most_joints == 1 else f"{limits.most_joints} pieces in a row"
    again = f", of {limits.most_generations} generations" if limits.most_generations > 1 else ""
    opened = "those that" if limits.openings else "none that"
    return (
        f"pieces of {limits.least_tokens} tokens or more, moved by {limits.most_distance} at most "
        f"towards the beginning and {limits.most_later} towards the end, "
        f"{opened} opened a prompt among them, {pieces}{again}, the last {limits.margin} tokens "
        f"computed: no more than {bar.most_kl} nats and {100 - 100 * bar.least_agreement:.0f} % of "
        "the tokens differ"
    )
